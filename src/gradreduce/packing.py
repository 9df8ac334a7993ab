"""Which tensors travel together, and their way in and out of one memory; never adds.

A plan is a value: it depends on sizes, dtypes and settings, never on data or devices. A *flat
buffer* holds tensors of one dtype end to end; a *pack* is a range of it that is reduced as one
(DDP says bucket). A tensor may lie across two packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gradreduce import ops
from gradreduce.device import (
    ALIGNMENT,
    Buffer,
    Device,
    DType,
    FlatLayout,
    by_physical,
    flat_layout,
    gather,
    scatter,
)

__all__ = ["FlatPlan", "Flats", "pack", "plan_packing", "unpack"]


@dataclass(frozen=True)
class FlatPlan:
    """One flat buffer.

    Attributes:
        tensors: places in the batch of the tensors in it, in order.
        dtype: of the gradients in it.
        out_dtype: of the results.
        layout: where each tensor lies, in elements; on vector boundaries in both dtypes.
        packs: ``(start, stop)`` elements of each pack, in order, none empty; on vector boundaries
            in both dtypes too.
        together: False for a tensor that travels alone and need not be moved into a flat buffer.
    """

    tensors: tuple[int, ...]
    dtype: DType
    out_dtype: DType
    layout: FlatLayout
    packs: tuple[tuple[int, int], ...]
    together: bool


@lru_cache(maxsize=256)
def plan_packing(
    sizes: tuple[int, ...],
    dtypes: tuple[tuple[DType, DType], ...],
    num_packs: int,
    small_max_bytes: int = 0,
    small_max_group: int = 0,
) -> tuple[FlatPlan, ...]:
    """Which tensors of a batch share a flat buffer, and how it is cut into packs.

    1. ``num_packs`` above 0: one flat buffer for each dtype, tensors in batch order, cut into
       that many packs that are equal to within 16 bytes; fewer if there are fewer 16-byte units.
    2. Otherwise, with both ``small`` limits above 0: tensors of at most ``small_max_bytes`` are
       grouped by dtype, in batch order, at most ``small_max_group`` to a group.
    3. What is left travels alone; so does the only member of a group.

    Args:
        sizes: elements of each tensor of the batch.
        dtypes: of each tensor: that of the gradient, and that of the result.
        num_packs: see above.
        small_max_bytes: see above.
        small_max_group: see above.

    Returns:
        The plans; every tensor of the batch is in exactly one.
    """
    by_dtype: dict[tuple[DType, DType], list[int]] = {}
    for tensor, pair in enumerate(dtypes):
        by_dtype.setdefault(pair, []).append(tensor)
    plans = []
    for pair, tensors in by_dtype.items():
        if num_packs > 0:
            groups = [tensors]
        else:
            groups = _small_groups(tensors, sizes, pair[0], small_max_bytes, small_max_group)
        for group in groups:
            layout = flat_layout([sizes[tensor] for tensor in group], _narrower(pair))
            cuts = _cut(layout.size, _narrower(pair), num_packs)
            together = num_packs > 0 or len(group) > 1
            if not together:  # no gap behind a tensor that stays where it is
                layout = FlatLayout((0,), (sizes[group[0]],), sizes[group[0]])
                cuts = ((0, layout.size),) if layout.size else ()
            plans.append(FlatPlan(tuple(group), *pair, layout, cuts, together))
    return tuple(plans)


def _small_groups(
    tensors: list[int],
    sizes: tuple[int, ...],
    dtype: DType,
    max_bytes: int,
    max_group: int,
) -> list[list[int]]:
    """Groups of small tensors in the order of their first members, each of the rest alone."""
    groups: list[list[int]] = []
    open_group: list[int] | None = None
    for tensor in tensors:
        small = max_group > 0 and 0 < sizes[tensor] * dtype.itemsize <= max_bytes
        if small and open_group is not None and len(open_group) < max_group:
            open_group.append(tensor)
            continue
        groups.append([tensor])
        if small:
            open_group = groups[-1]
    return groups


def _cut(size: int, itemsize: int, num_packs: int) -> tuple[tuple[int, int], ...]:
    """``size`` elements in at most ``num_packs`` ranges (at least one) of whole 16-byte units."""
    unit = max(1, ALIGNMENT // itemsize)
    units = -(-size // unit)
    count = min(max(1, num_packs), units)
    ends = [units * pack // count * unit for pack in range(count)] + [size] if units else []
    return tuple(pairwise(ends))


def _narrower(pair: tuple[DType, DType]) -> int:
    return min(pair[0].itemsize, pair[1].itemsize)


@dataclass(frozen=True)
class Flats:
    """The flat buffers of one plan while they are reduced.

    Attributes:
        plan: what they hold.
        inputs: one for each replica.
        outs: one for each replica; the inputs themselves where those are ours to overwrite.
    """

    plan: FlatPlan
    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]


def pack(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    *,
    consume: bool,
) -> list[Flats]:
    """Puts the tensors of each plan into one flat buffer on every device.

    Nothing is moved where the tensors lie in one already (``mesh.flat_buffer``), or where one
    travels alone, unless it is a caller's memory that another physical device must read: a peer
    reads our pool's only. Co-located devices share one launch for each dtype.

    Args:
        plans: from ``plan_packing``.
        gradients: ``gradients[tensor][replica]``.
        devices: of the replicas.
        consume: the gradients may be overwritten, and what lies between them in a flat buffer.

    Returns:
        Flat buffers, in the order of ``plans``.
    """
    owned_only = len(by_physical(devices)) > 1
    moved: dict[Device, list[tuple[list[Buffer], list[Buffer]]]] = {}
    made = []
    for plan in plans:
        inputs, outs = [], []
        for replica, device in enumerate(devices):
            tensors = [gradients[tensor][replica] for tensor in plan.tensors]
            flat = _already_flat(plan, tensors, owned_only)
            ours = flat is None or consume
            if flat is None:
                flat = device.empty((plan.layout.size,), plan.dtype)
                moved.setdefault(device, []).append((_parts(plan, flat), tensors))
            in_place = ours and plan.dtype == plan.out_dtype
            inputs.append(flat)
            outs.append(flat if in_place else device.empty((plan.layout.size,), plan.out_dtype))
        made.append(Flats(plan, tuple(inputs), tuple(outs)))
    _move(moved)
    return made


def unpack(flats: Sequence[Flats], shapes: Sequence[tuple[int, ...]]) -> list[tuple[Buffer, ...]]:
    """The reduced tensors: views of the flat outs, ``[tensor][replica]`` in batch order."""
    results: list[tuple[Buffer, ...]] = [()] * len(shapes)
    for flat in flats:
        inside = [shapes[tensor] for tensor in flat.plan.tensors]
        columns = [out.parts(flat.plan.layout.offsets, inside) for out in flat.outs]
        for tensor, replicas in zip(flat.plan.tensors, zip(*columns, strict=True), strict=True):
            results[tensor] = replicas
    return results


def _move(moved: dict[Device, list[tuple[list[Buffer], list[Buffer]]]]) -> None:
    """One launch for each physical device and dtype."""
    devices = list(moved)
    for places in by_physical(devices).values():
        sharing = [devices[place] for place in places]
        jobs = [job for device in sharing for job in moved[device]]
        leader = sharing[0]
        gather(leader, sharing)
        ops.pack(
            [part for parts, _ in jobs for part in parts],
            [tensor for _, tensors in jobs for tensor in tensors],
            device=leader,
        )
        scatter(leader, sharing)


def _parts(plan: FlatPlan, flat: Buffer) -> list[Buffer]:
    """The flat buffer in one part for each tensor, the gap behind it included."""
    layout = plan.layout
    return flat.parts(layout.offsets, [(span,) for span in layout.spans])


def _already_flat(plan: FlatPlan, tensors: list[Buffer], owned_only: bool) -> Buffer | None:
    """The flat buffer in which the tensors lie just as planned; None if they do not."""
    filled = [place for place, tensor in enumerate(tensors) if tensor.size]
    if not filled:
        return tensors[0] if tensors[0].size == plan.layout.size else None
    block = tensors[filled[0]].block
    if owned_only and not block.owned:
        return None
    start = tensors[filled[0]].address - plan.layout.offsets[filled[0]] * plan.dtype.itemsize
    for place in filled:
        expected = start + plan.layout.offsets[place] * plan.dtype.itemsize
        if tensors[place].block is not block or tensors[place].address != expected:
            return None
    offset = start - block.address
    size = plan.layout.size
    inside = offset >= 0 and offset + size * plan.dtype.itemsize <= block.nbytes
    if not inside or (plan.together and start % ALIGNMENT):
        return None
    return Buffer(block, offset, (size,), plan.dtype)
