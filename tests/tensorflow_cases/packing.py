"""Steps about the packer by itself: which tensors travel together, and the way back."""

from typing import Any

import numpy as np
from support.all_reduce_jobs import pack

import gradreduce as gr
from gradreduce.reduce.pack_buffers import PackBuffers, unpack
from gradreduce.reduce.packing import FlatPlan, plan_packing

from .encoding import decoded, host
from .world import Doing, World

PACK = "packing_var_placeholder"  # TensorFlow's tag of a pack, in the place of a variable's
LARGE = 1000  # elements, more than any limit of a case


def _plans(sizes: list[int], dtypes: list[Any], *limits: int) -> tuple[FlatPlan, ...]:
    """The packer's answer; ``limits`` are number of packs, bytes and members of a group.

    Numbers that the packer would never be given are refused where a caller gives them.
    """
    gr.AllReduceCrossDeviceOps("hierarchical_copy", *limits)
    num_packs, max_bytes, max_group = (*limits, 0, 0)[:3]
    pairs = tuple((dtype, dtype) for dtype in dtypes)
    return plan_packing(tuple(sizes), pairs, num_packs, max_bytes, max_group)


def _packed(world: World, step: dict[str, Any], *limits: int) -> tuple[list[PackBuffers], Any]:
    """The flat buffers, and what comes out of them: ``unpacked[device][tensor]``."""
    rows = [[decoded(each) for each in row] for row in step["device_tensors"]]
    devices = world.mesh.devices[: len(rows)]
    plans = _plans([each.size for each in rows[0]], [each.dtype for each in rows[0]], *limits)
    gradients = [
        [device.upload(row[tensor]) for device, row in zip(devices, rows, strict=True)]
        for tensor in range(len(rows[0]))
    ]
    packed = pack(plans, gradients, devices, consume=True)
    tensors = unpack(packed, [each.shape for each in rows[0]])
    return packed, [[each[replica] for each in tensors] for replica in range(len(rows))]


def _inside(packed: PackBuffers, row: list[Any], replica: int, start: int, stop: int) -> np.ndarray:
    """What a range of a flat buffer holds of the tensors of a row, without the gaps."""
    array = host(packed.inputs[replica]).reshape(-1)  # one that is alone keeps its shape
    filled = np.zeros(array.size, bool)
    for offset, tensor in zip(packed.plan.layout.offsets, packed.plan.tensors, strict=True):
        filled[offset : offset + row[tensor].size] = True
    return array[start:stop][filled[start:stop]]


def _concat_split_pack(world: World, step: dict[str, Any]) -> Any:
    packed, unpacked = _packed(world, step, step["num_packs"])
    ranges = [(flat, pack) for flat in packed for pack in flat.plan.packs]
    packs = [
        [_inside(flat, row, replica, *pack) for flat, pack in ranges]
        for replica, row in enumerate(unpacked)
    ]
    return {"packs": packs, "unpacked": unpacked, "ranges": [pack for _, pack in ranges]}


def _pack_small_tensors(world: World, step: dict[str, Any]) -> Any:
    """Packs first, then the tensors that travel alone; as TensorFlow lists them."""
    packed, unpacked = _packed(world, step, 0, step["max_bytes"], step["max_group"])
    packs = [flat for flat in packed if flat.plan.together]
    alone = sorted(flat.plan.tensors[0] for flat in packed if not flat.plan.together)
    found: dict[str, Any] = {"packed": [], "layout": [], "packing": {}, "unpacked": unpacked}
    for replica, row in enumerate(unpacked):
        whole = [_inside(flat, row, replica, 0, flat.plan.layout.size) for flat in packs]
        found["packed"].append(whole + [row[tensor] for tensor in alone])
        found["layout"].append([PACK] * len(packs) + [f"v{tensor}" for tensor in alone])
        for place, flat in enumerate(packs):
            found["packing"][f"{replica}:{place}"] = list(flat.plan.tensors)
    return found


def _extract_ranges(world: World, step: dict[str, Any]) -> Any:
    """Of a batch in which the tensors at ``indices`` alone are small: first and last of a group."""
    indices, limit = step["indices"], step["range_size_limit"]
    sizes = [1 if tensor in indices else LARGE for tensor in range(max(indices, default=0) + 1)]
    plans = _plans(sizes, [np.dtype("float32")] * len(sizes), 0, 4, limit)
    groups = [plan.tensors for plan in plans if plan.tensors[0] in indices]
    return {
        "ranges": [[group[0], group[-1]] for group in groups if len(group) > 1],
        "singles": [group[0] for group in groups if len(group) == 1],
    }


STEPS: dict[str, Doing] = {
    "concat_split_pack": _concat_split_pack,
    "pack_small_tensors": _pack_small_tensors,
    "extract_ranges": _extract_ranges,
}
