"""The pipeline of a reduction across devices: plan, pack, all-reduce, unpack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

from gradreduce import ops
from gradreduce.arrays.distributed import Part, ReduceOp
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    PackInfo,
    accumulate_dtype,
    by_physical,
    mean_dtype,
)

from .algorithms import ALGORITHMS
from .arguments import Request, batches_of
from .hierarchical_copy import works_in_place
from .nccl_all_reduce import check_library, connect
from .one_device import Accumulate, added_on, broadcast_values, quotients
from .pack_buffers import Options, PackBuffers, fill, lay_out, move_into, unpack, unpack_into
from .packing import (
    STAGE_BYTES,
    FlatPlan,
    is_half,
    plan_packing,
    plan_stages,
    sum_dtype_of,
    wire_of,
)
from .reduction_groups import ReductionGroups, reduction_groups_of
from .stages import Job, Stage

__all__ = [
    "Settings",
    "check_devices",
    "compile_for",
    "copy_to_out",
    "laid_out",
    "reduce_buffers",
    "reduce_requests",
    "reduce_to_one",
]


@dataclass(frozen=True)
class Settings:
    """Checked arguments of an ``AllReduceCrossDeviceOps``; see there."""

    all_reduce_alg: str
    num_packs: int
    agg_small_grads_max_bytes: int
    agg_small_grads_max_group: int
    reduction_groups: ReductionGroups | None
    wire_dtype: DType | None


def reduce_requests(
    settings: Settings, reduce_op: ReduceOp, requests: Sequence[Request], *, coalesce: bool
) -> list[tuple[Part, ...]]:
    """Reduces checked requests: dense values on the same devices in one batch, others singly.

    Results go to a request's ``out`` where possible; ``copy_to_out`` copies the others.
    """
    results: list[tuple[Part, ...]] = [()] * len(requests)
    batches = batches_of(requests, reduce_op)
    for indices in batches:  # all of them, before the first is launched
        _compile_batch(settings, reduce_op, [requests[index] for index in indices])
    for request in requests:
        if not request.is_all_reduced and not request.value.is_sparse:
            _compile_one(reduce_op, request)
    for indices in batches:
        gradients = [requests[index].value.buffers for index in indices]
        out = [requests[index].out or () for index in indices]
        reduced = _reduce_dense(settings, reduce_op, gradients, indices, out if out[0] else None)
        for index, buffers in zip(indices, reduced, strict=True):
            results[index] = buffers
    for index, request in enumerate(requests):
        if not request.is_all_reduced:
            home = request.devices[0]
            with home.mesh_state.pack_scope(PackInfo((index,))):
                results[index] = reduce_to_one(reduce_op, request, home, coalesce=coalesce)
    return results


def _compile_batch(settings: Settings, reduce_op: ReduceOp, requests: Sequence[Request]) -> None:
    """Compiles all kernels of one batch; raises if it cannot be reduced."""
    check_devices(settings, requests[0].devices)
    devices = requests[0].value.devices
    for dtype in dict.fromkeys(request.value.buffers[0].dtype for request in requests):
        compile_for(settings, devices, dtype, dtype)
        _compile_rest(reduce_op, devices, dtype)


def _compile_one(reduce_op: ReduceOp, request: Request) -> None:
    """Compiles the kernels that add one dense value on one device and copy the result."""
    dtype = request.value.buffers[0].dtype
    devices = (*request.value.devices, *request.devices)
    key = ("one", tuple(device.index for device in devices), dtype)
    prepared = devices[0].mesh_state.prepared
    if key not in prepared:
        for device in devices:
            ops.prepare_all_sum(device, dtype, dtype)
        prepared.add(key)
    _compile_rest(reduce_op, devices, dtype)


def _compile_rest(reduce_op: ReduceOp, devices: Sequence[Device], dtype: DType) -> None:
    """Compiles the division of integers, and the copies into the caller's ``out``."""
    counts = reduce_op is ReduceOp.MEAN and dtype.kind in "iu"
    key = ("rest", tuple(device.index for device in devices), dtype, counts)
    prepared = devices[0].mesh_state.prepared
    if key in prepared:
        return
    result = mean_dtype(dtype) if counts else dtype
    for device in devices:
        ops.prepare_pack(device, result, result)
        if counts:
            ops.prepare_divide(device, dtype)
    prepared.add(key)


def _reduce_dense(
    settings: Settings,
    reduce_op: ReduceOp,
    gradients: Sequence[tuple[Buffer, ...]],
    positions: Sequence[int],
    out: Sequence[tuple[Buffer, ...]] | None,
) -> list[tuple[Buffer, ...]]:
    """Reduces one batch of dense values; means of integers are added, then divided."""
    num_replicas = len(gradients[0])
    mean = reduce_op is ReduceOp.MEAN
    counts = mean and gradients[0][0].dtype.kind in "iu"
    divisor = _divisor_of(reduce_op, gradients)
    written = None if counts else out
    reduced = reduce_buffers(settings, gradients, divisor=divisor, out=written, positions=positions)
    if not counts:
        return reduced
    means = iter(quotients([total for totals in reduced for total in totals], num_replicas))
    return [tuple(islice(means, num_replicas)) for _ in reduced]


def copy_to_out(
    requests: Sequence[Request], reduced: Sequence[tuple[Part, ...]]
) -> list[tuple[Part, ...]]:
    """Copies results to the requests' ``out`` where they lie elsewhere."""
    rows: list[tuple[Buffer, Buffer]] = []
    for request, parts in zip(requests, reduced, strict=True):
        for out, part in zip(request.out or (), parts, strict=bool(request.out)):
            if out is not part:
                assert isinstance(part, Buffer), "IndexedSlices were rejected"
                rows.append((out, part))
    move_into(rows)
    return [request.out or parts for request, parts in zip(requests, reduced, strict=True)]


def reduce_to_one(
    reduce_op: ReduceOp,
    request: Request,
    home: Device,
    *,
    coalesce: bool,
    accumulate: Accumulate | None = None,
) -> tuple[Part, ...]:
    """Adds one value on ``home`` and copies the result to the request's devices."""
    value = request.value
    total = added_on(
        home,
        value.parts,
        mean=reduce_op is ReduceOp.MEAN,
        coalesce=coalesce,
        accumulate=accumulate,
        kind=value.kind,
    )
    return broadcast_values(total, request.devices)


def _flat_plans(
    settings: Settings,
    gradients: Sequence[Sequence[Buffer]],
    out_dtypes: Sequence[DType] | None = None,
) -> tuple[FlatPlan, ...]:
    """Plans the flat buffers of one batch and their packs; see ``plan_packing``."""
    dtypes = [replicas[0].dtype for replicas in gradients]
    return plan_packing(
        tuple(replicas[0].size for replicas in gradients),
        tuple(zip(dtypes, out_dtypes or dtypes, strict=True)),
        settings.num_packs,
        settings.agg_small_grads_max_bytes,
        settings.agg_small_grads_max_group,
        settings.wire_dtype,
    )


def reduce_buffers(
    settings: Settings,
    gradients: Sequence[Sequence[Buffer]],
    *,
    divisor: float = 1,
    out_dtypes: Sequence[DType] | None = None,
    consume: ExitStack | None = None,
    out: Sequence[Sequence[Buffer]] | None = None,
    positions: Sequence[int] | None = None,
) -> list[tuple[Buffer, ...]]:
    """Sums ``gradients[tensor][replica]`` across devices, and divides the sums.

    Args:
        settings: how.
        gradients: of each tensor one Buffer for each replica, on the same devices in the same
            order for every tensor; replicas of one shape and dtype.
        divisor: of every sum.
        out_dtypes: of the results; default those of the gradients.
        consume: not None: the gradients may be overwritten and become the results' memory. If
            they are, the devices are marked as failed when anything fails between the first launch
            and the end of this ``ExitStack``: sums and gradients could not be told apart.
        out: ``out[tensor][replica]``, where the results go, of their dtype; each apart from all
            others, and from all gradients but its own. Default: new memory.
        positions: numbers of the tensors in errors and in the flight record; default their indices
            here.

    Returns:
        ``[tensor][replica]``, all replicas of a tensor equal; ``out``'s own if it was given.

    Raises:
        ValueError, BackendUnavailableError: what ``compile_for`` raises, before any launch.
    """
    if not gradients:
        return []
    shapes = [replicas[0].shape for replicas in gradients]
    devices = [buffer.device for buffer in gradients[0]]
    plans = _flat_plans(settings, gradients, out_dtypes)
    for plan in plans:
        compile_for(settings, devices, plan.dtype, plan.out_dtype)
    in_place = settings.all_reduce_alg != "hierarchical_copy" or works_in_place(devices)
    options = Options(consume is not None and in_place, out, in_place)
    pack_buffers = lay_out(
        plans, gradients, devices, options, _pack_divisors(settings, plans, divisor)
    )
    jobs, stages = _jobs_and_stages(
        pack_buffers, divisor, devices, positions or range(len(gradients))
    )
    reduction_groups = (
        {} if settings.reduction_groups is None else {"reduction_groups": settings.reduction_groups}
    )
    if (
        consume is not None
        and options.consume
        and any([None in each.filling for each in pack_buffers])
    ):
        consume.enter_context(devices[0].mesh_state.fail_on_partial_write(devices))
    ALGORITHMS[settings.all_reduce_alg](jobs, stages=stages, **reduction_groups)
    return unpack(pack_buffers, shapes) if out is None else [tuple(replicas) for replicas in out]


def laid_out(
    settings: Settings, reduce_op: ReduceOp, gradients: Sequence[Sequence[Buffer]]
) -> list[PackBuffers]:
    """Allocates the memory in which one batch of ``reduce_requests`` is reduced."""
    plans = _flat_plans(settings, gradients)
    devices = [buffer.device for buffer in gradients[0]]
    early = _pack_divisors(settings, plans, _divisor_of(reduce_op, gradients))
    return lay_out(plans, gradients, devices, Options(), early)


def _divisor_of(reduce_op: ReduceOp, gradients: Sequence[Sequence[Buffer]]) -> float:
    """Returns the divisor of the sums of one batch, of floats or of integers."""
    counts = gradients[0][0].dtype.kind in "iu"
    return len(gradients[0]) if reduce_op is ReduceOp.MEAN and not counts else 1


def _pack_divisors(settings: Settings, plans: Sequence[FlatPlan], divisor: float) -> list[float]:
    """Returns the divisors applied at packing: on a 16-bit wire the sum may overflow."""
    return [
        divisor if plan.wire == settings.wire_dtype and is_half(plan.wire) else 1 for plan in plans
    ]


def _jobs_and_stages(
    pack_buffers: Sequence[PackBuffers],
    divisor: float,
    devices: Sequence[Device],
    positions: Sequence[int],
) -> tuple[list[Job], list[Stage]]:
    """Returns a job for each pack, and the stages in which they overlap."""
    packs = [(each, start, stop) for each in pack_buffers for start, stop in each.plan.packs]
    jobs = [
        Job(each.inputs, each.outs, divisor if each.divisor == 1 else 1).part(start, stop)
        for each, start, stop in packs
    ]
    if len(by_physical(devices)) > 1:
        sizes = [
            ((stop - start) * each.plan.wire.itemsize, each.is_moved) for each, start, stop in packs
        ]
        groups = plan_stages(sizes, STAGE_BYTES)
    else:
        groups = [list(range(len(packs)))]
    stages = []
    for group in groups:
        parts = [packs[index] for index in group]
        pack_info = _pack_info(parts, group, len(packs), positions)
        watched = partial(devices[0].mesh_state.pack_scope, pack_info, devices)
        stages.append(Stage(group, partial(fill, parts), partial(unpack_into, parts), watched))
    return jobs, stages


def _pack_info(
    parts: Sequence[tuple[PackBuffers, int, int]],
    group: Sequence[int],
    num_packs: int,
    positions: Sequence[int],
) -> PackInfo:
    """Returns the packs of a stage, counted from 1, and their tensors."""
    if len(group) == num_packs:
        return PackInfo(positions, range(1, num_packs + 1), num_packs)
    inside = {
        positions[each.plan.tensors[piece.tensor]]: None
        for each, start, stop in parts
        for piece in each.plan.pieces(start, stop)
    }
    return PackInfo(tuple(inside), tuple(index + 1 for index in group), num_packs)


def compile_for(
    settings: Settings, devices: Sequence[Device], dtype: DType, out_dtype: DType
) -> None:
    """Compiles all kernels of ``reduce_buffers``, and connects the devices for NCCL.

    Not called while a lock is held; if it fails, nothing was launched.

    Args:
        settings: how it reduces.
        devices: of the replicas.
        dtype: of the gradients.
        out_dtype: of the results.

    Raises:
        ValueError: ``reduction_groups`` names another number of replicas.
        BackendUnavailableError: NCCL is needed, on two physical GPUs or more, and missing.
        CollectiveError: NCCL cannot connect them.
    """
    prepared = devices[0].mesh_state.prepared
    indices = tuple(device.index for device in devices)
    wire = wire_of(dtype, settings.wire_dtype)
    key = (
        "reduce",
        settings.all_reduce_alg,
        indices,
        dtype,
        wire,
        out_dtype,
        settings.reduction_groups,
    )
    if key in prepared:
        return
    check_devices(settings, devices)
    total = sum_dtype_of(wire, out_dtype)
    counts = {
        len(group) for group in reduction_groups_of(len(devices), settings.reduction_groups)
    } - {0}
    if settings.all_reduce_alg == "nccl":
        counts = set()
        connect(devices)
    num_terms = {1, 2, len(devices), *map(len, by_physical(devices).values())}
    for device in devices:
        for out, term in dict.fromkeys([(wire, dtype), (out_dtype, total)]):
            ops.prepare_pack(device, out, term)
        acc_dtype = accumulate_dtype(wire)
        for out, term in dict.fromkeys([(total, wire), (wire, wire), (total, acc_dtype)]):
            ops.prepare_all_sum(device, out, term, num_terms)
        for count in counts:
            ops.prepare_add_n(device, acc_dtype, wire, count)
    prepared.add(key)


def check_devices(settings: Settings, devices: Sequence[Device]) -> None:
    """Raises unless replicas on these devices can be reduced."""
    reduction_groups_of(len(devices), settings.reduction_groups)
    if settings.all_reduce_alg == "nccl":
        check_library(devices)
