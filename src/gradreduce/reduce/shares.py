"""The pipeline of reduce-scatter and all-gather: plan, pack, reduce or copy, unpack.

A reduce-scatter is a sum of one share of the tensors for each replica, its owner; an all-gather is
a copy of each owner's share to all. The shares of an owner are packed as tensors of an all-reduce
are: end to end in one flat buffer for each dtype, or not at all where they lie so already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from gradreduce import ops
from gradreduce.arrays.distributed import ReduceOp
from gradreduce.device import Buffer, Device, DType, PackInfo
from gradreduce.device.exchange import agreed
from gradreduce.device.process_group import Description

from .algorithm import Algorithm, Job
from .arguments import Request, batches_of
from .one_device import quotients
from .pack_buffers import Share, lay_out, move, moves_in, moves_out, unpack_shares
from .packing import FlatPlan, is_half, plan_packing, sum_dtype_of, wire_of
from .pipeline import Settings, algorithm_of, compile_for, names_of, remember
from .process_values import described, num_replicas_of

Call = Literal["reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class SharesPlan:
    """What one call does, as far as sizes, dtypes and devices decide it.

    Attributes:
        call: which one.
        devices: of the replicas of this process.
        algorithm: sums or copies.
        flat: the flat buffers, in the order of their owners.
        shares: of each, whose it is.
        divisors: of each, applied at packing.
        divisor: of the sums of the others.
        description: for the comparison with other processes; None in one process.
    """

    call: Call
    devices: tuple[Device, ...]
    algorithm: Algorithm
    flat: tuple[FlatPlan, ...]
    shares: tuple[Share, ...]
    divisors: tuple[float, ...]
    divisor: float
    description: Description | None


def first_replica(device: Device) -> int:
    """Returns the number of this process's first replica among those of all processes."""
    group = device.mesh_state.process_group
    return 0 if group is None else sum(group.counts[: group.rank])


def plan_shares(
    call: Call,
    settings: Settings,
    devices: tuple[Device, ...],
    shares: Sequence[Sequence[tuple[int, DType, DType]]],
    description: Description | None,
    *,
    divisor: float = 1,
) -> SharesPlan:
    """Plans a reduce-scatter or an all-gather, and compiles its kernels.

    Not called while a lock is held; if it fails, nothing was launched.

    Args:
        call: which one.
        settings: how it reduces. An all-gather copies each tensor in its own dtype.
        devices: of the replicas of this process.
        shares: for each replica of all processes, the size of each tensor of its share, its dtype,
            and that of the result.
        description: see ``SharesPlan``.
        divisor: of every sum.

    Raises:
        ValueError: ``reduction_groups`` names another number of replicas.
        BackendUnavailableError: NCCL is needed, on two physical GPUs or more, and missing.
        CollectiveError: NCCL cannot connect them.
    """
    wire = _wire_of(call, settings)
    for pair in {(dtype, out): None for share in shares for _, dtype, out in share}:
        compile_shares(call, settings, devices, *pair)
    algorithm = algorithm_of(settings, devices)
    first, everyone = first_replica(devices[0]), tuple(range(len(devices)))
    flat: list[FlatPlan] = []
    owned: list[Share] = []
    num_before = 0
    for owner, share in enumerate(shares):
        here = (owner - first,) if owner - first in everyone else ()
        roles = (everyone, here) if call == "reduce_scatter" else (here, everyone)
        sizes = tuple([size for size, *_ in share])
        dtypes = tuple([(dtype, out) for _, dtype, out in share])
        for plan in plan_packing(sizes, dtypes, *settings[1:4], wire):
            tensors = tuple([num_before + tensor for tensor in plan.tensors])
            flat.append(replace(plan, tensors=tensors))
            owned.append(Share(owner, *roles))
        num_before += len(share)
    # On a 16-bit wire the sum may overflow.
    early = [wire is not None and each.wire == wire and is_half(wire) for each in flat]
    divisors = tuple([divisor if is_early else 1 for is_early in early])
    return SharesPlan(
        call, devices, algorithm, tuple(flat), tuple(owned), divisors, divisor, description
    )


def _wire_of(call: Call, settings: Settings) -> DType | None:
    return settings.wire_dtype if call == "reduce_scatter" else None


def compile_shares(
    call: Call, settings: Settings, devices: tuple[Device, ...], dtype: DType, out_dtype: DType
) -> None:
    """Compiles all kernels of ``run_shares`` for a dtype and that of the results.

    Raises:
        ValueError, BackendUnavailableError, CollectiveError: see ``plan_shares``.
    """
    wire = _wire_of(call, settings)
    key = ("shares", settings, wire, devices, dtype, out_dtype)
    prepared = devices[0].mesh_state.prepared
    if key in prepared:
        return
    compile_for(settings._replace(wire_dtype=wire), devices, dtype, out_dtype)
    carried = wire_of(dtype, wire)
    for device in devices:  # what an algorithm without a reduce-scatter of its own launches
        total = sum_dtype_of(carried, out_dtype)
        ops.prepare_all_sum(device, total, carried, {len(devices)})
    prepared.add(key)


def run_shares(
    plan: SharesPlan,
    tensors: Sequence[Sequence[Buffer]],
    *,
    out: Sequence[Sequence[Buffer]] | None = None,
    positions: Sequence[int] = (),
    names: Sequence[str] = (),
) -> list[Buffer | None]:
    """Runs a plan: packs all shares, sums or copies them, and unpacks them.

    Args:
        plan: from ``plan_shares``.
        tensors: the tensors of all shares, one share after the other: of each one Buffer for each
            replica of this process that has it. Of an all-gather that is the owner alone, so that
            the tensors of other processes' replicas are empty lists.
        out: where the results go, of each tensor one Buffer for each replica of this process that
            gets it: for an all-gather all. Default, for a reduce-scatter: new memory.
        positions: numbers of the tensors in errors and in the flight record.
        names: of the tensors, one for each position; empty: they have none.

    Returns:
        Of a reduce-scatter the tensors of the shares of this process, None for the others.
    """
    made = lay_out(
        plan.flat, plan.divisors, tensors, plan.algorithm, targets=out, shares=plan.shares
    )
    packs = [(each, *pack) for each in made for pack in each.plan.packs]
    jobs = []
    for (buffers, start, stop), share in zip(
        packs,
        [share for share, each in zip(plan.shares, made, strict=True) for _ in each.plan.packs],
        strict=True,
    ):
        job = Job(
            [buffers.inputs[replica] for replica in share.senders],
            [buffers.outs[replica] for replica in share.receivers],
            plan.divisor if buffers.divisor == 1 else 1,
            share.owner,
        )
        whole = stop - start == buffers.plan.layout.size
        jobs.append(job if whole else job.part(start, stop))
    mesh_state, what = plan.devices[0].mesh_state, plan.description
    agreement = nullcontext() if what is None else agreed(plan.devices[0], what)
    label = PackInfo(positions, range(1, len(packs) + 1), len(packs), names)
    with mesh_state.launch_lock, agreement, mesh_state.pack_scope(label, plan.devices):
        mesh_state.thread.phase = "pack"
        move(moves_in(packs))
        mesh_state.thread.phase = plan.call.replace("_", "-")
        if plan.call == "reduce_scatter":
            plan.algorithm.reduce_scatter(jobs)
        else:
            plan.algorithm.all_gather(jobs)
        mesh_state.thread.phase = "unpack"
        move(moves_out(packs))
    if out is not None:
        return []
    return unpack_shares(made, plan.shares, [replicas[0].shape for replicas in tensors])


def reduced_shares(
    settings: Settings, reduce_op: ReduceOp, requests: Sequence[Request]
) -> list[tuple[Buffer, ...]]:
    """Reduces checked requests; each replica of this process gets its rows of each result.

    Args:
        settings: how it reduces.
        reduce_op: see ``AllReduceCrossDeviceOps.reduce_scatter``.
        requests: dense values on the devices of a mesh; the number of replicas divides their rows.
    """
    results: list[tuple[Buffer, ...]] = [()] * len(requests)
    for indices, counts in batches_of(requests, reduce_op)[0]:
        gradients = [requests[index].value.buffers for index in indices]
        devices = requests[indices[0]].devices
        num_replicas = num_replicas_of(gradients[0])
        divisor = num_replicas if reduce_op is ReduceOp.MEAN and not counts else 1
        names = names_of(requests, indices)
        plan = _planned(
            "reduce_scatter", settings, gradients, num_replicas, divisor, names, counts=counts
        )
        rows = [
            [_rows_of(buffer, owner, num_replicas) for buffer in replicas]
            for owner in range(num_replicas)
            for replicas in gradients
        ]
        made = run_shares(plan, rows, positions=indices, names=names)
        first, count = first_replica(devices[0]), len(indices)
        own = made[first * count : (first + len(devices)) * count]
        found = [each for each in own if each is not None]
        if counts:
            with devices[0].mesh_state.pack_scope(PackInfo(indices, names=names)):
                found = quotients(found, num_replicas)
        for position, index in enumerate(indices):
            results[index] = tuple(found[position::count])
    return results


def joined_shares(settings: Settings, requests: Sequence[Request]) -> list[tuple[Buffer, ...]]:
    """Concatenates the replicas of checked requests on every device of this process.

    Args:
        settings: how bytes are transferred.
        requests: dense values on the devices of a mesh, not scalars.
    """
    if not requests:
        return []
    values = [request.value.buffers for request in requests]
    devices = requests[0].devices
    num_replicas = num_replicas_of(values[0])
    positions = range(len(requests))
    names = names_of(requests, positions)
    plan = _planned("all_gather", settings, values, num_replicas, 1, names)
    first = first_replica(devices[0])
    results = [
        request.out
        or tuple(
            [
                device.empty((num_replicas * part.shape[0], *part.shape[1:]), part.dtype)
                for device, part in zip(devices, parts, strict=True)
            ]
        )
        for request, parts in zip(requests, values, strict=True)
    ]
    own = range(first, first + len(devices))
    tensors = [
        [parts[owner - first]] if owner in own else []
        for owner in range(num_replicas)
        for parts in values
    ]
    out = [
        [_rows_of(whole, owner, num_replicas) for whole in wholes]
        for owner in range(num_replicas)
        for wholes in results
    ]
    run_shares(plan, tensors, out=out, positions=positions, names=names)
    return results


def _rows_of(whole: Buffer, owner: int, num_replicas: int) -> Buffer:
    """Returns the rows of a replica."""
    shape, size = (whole.shape[0] // num_replicas, *whole.shape[1:]), whole.size // num_replicas
    (part,) = whole.parts([owner * size], [size], [shape])
    return part


def _planned(
    call: Call,
    settings: Settings,
    gradients: Sequence[Sequence[Buffer]],
    num_replicas: int,
    divisor: float,
    names: tuple[str, ...],
    *,
    counts: bool = False,
) -> SharesPlan:
    """Returns the plan for equal shares of these tensors, which is remembered."""
    devices = tuple([buffer.device for buffer in gradients[0]])
    plans = devices[0].mesh_state.plans
    key = (
        call,
        settings,
        divisor,
        tuple([device.index for device in devices]),
        tuple([(replicas[0].shape, id(replicas[0].dtype)) for replicas in gradients]),
        counts,
        names,
    )
    found: SharesPlan | None = plans.get(key)
    if found is None:
        cut = num_replicas if call == "reduce_scatter" else 1
        share = [(row[0].size // cut, row[0].dtype, row[0].dtype) for row in gradients]
        what = described(
            settings, gradients, divisor, None,
            counts=counts, call=call, names=names, compared=True,
        )  # fmt: skip
        found = plan_shares(call, settings, devices, [share] * num_replicas, what, divisor=divisor)
        if counts:
            for dtype in dict.fromkeys([dtype for _, dtype, _ in share]):
                for device in devices:
                    ops.prepare_divide(device, dtype)
        remember(plans, key, found)
    return found
