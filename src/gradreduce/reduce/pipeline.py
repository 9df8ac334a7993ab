"""The pipeline of a reduction across devices: plan, pack, all-reduce, unpack.

Reduce-scatter and all-gather use it too. Each replica owns one share of the tensors; the shares of
an owner are packed like the tensors of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, cast

from gradreduce.arrays.distributed import Part, ReduceOp
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.backends.dry_run import DryRunDevice
from gradreduce.comm.description import Description
from gradreduce.comm.process_group import group_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Buffer, Device, DType, PackInfo, Queue, by_physical

from .across_processes import AcrossProcesses, ExactAcrossProcesses, process_groups
from .algorithm import Algorithm, Steps
from .algorithms import ALGORITHMS, Settings
from .arguments import Request, batches_of, label_of, names_of
from .hierarchical_copy import SLICE_BYTES, ExactCopy
from .nccl_across_processes import NcclAcrossProcesses
from .nccl_all_reduce import Nccl
from .one_device import Accumulate, copy_to_each, quotients, sum_on
from .pack_buffers import ONE, Pack, PackMove, lay_out, move, moves_in, moves_out, unpack
from .packing import (
    STAGE_BYTES,
    FlatPlan,
    Share,
    plan_packing,
    plan_stages,
)
from .process_values import describe_batch, slices_of_all
from .requests import copy_to_devices, rehearse_alone, with_all_reduced
from .weighting import Weighting

# The phases of operations in the log.
PHASES = ("pack", "all-reduce", "unpack")
_ALONE: AbstractContextManager[None] = nullcontext()
CollectiveName = Literal["all-reduce", "reduce-scatter", "all-gather"]
MOST_PLANS = 64  # of one mesh; a training script has a few


@dataclass(frozen=True)
class BatchPlan:
    """The plan of a batch; depends only on sizes, dtypes and devices.

    Attributes:
        call: the collective, such as ``"all-reduce"``; the log's phase of additions.
        devices: the devices of the replicas.
        algorithm: the algorithm that reduces the packs.
        flat: the layouts of the flat buffers; for shares in the order of their owners.
        divisor: divides the sums that are not divided at packing; None: ``reduce_batch`` gets it.
        counts: whether the sums are integers that are divided to floats after the addition.
        packs: for each pack the index of its flat buffer, the first element, and one past the last.
        description: for the comparison with other processes; None in one process.
        names: the names of the tensors; empty if they have none.
    """

    call: CollectiveName
    devices: tuple[Device, ...]
    algorithm: Algorithm
    flat: tuple[FlatPlan, ...]
    divisor: float | None
    counts: bool
    packs: tuple[tuple[int, int, int], ...]
    description: Description | None = None
    names: tuple[str, ...] = ()


def plan_batch(  # noqa: PLR0913  # all of it determines the plan
    settings: Settings,
    gradients: Sequence[Sequence[Buffer]],
    *,
    divisor: float | None = 1,
    out_dtypes: Sequence[DType] | None = None,
    counts: bool = False,
    names: tuple[str, ...] = (),
    compared: bool = False,
    call: CollectiveName = "all-reduce",
    is_weighted: bool = False,
) -> BatchPlan:
    """Plans the reduction of one batch, compiles its kernels, and keeps the plan.

    The caller holds no lock and has launched nothing yet.

    Args:
        settings: the settings of the reduction.
        gradients: for each tensor one Buffer for each replica, on the same devices in the same
            order for all tensors; the replicas of a tensor have one shape and dtype. With
            ``settings.num_words`` above 1 so many Buffers for each replica, side by side.
        divisor: divides every sum. None: a number that ``reduce_batch`` gets, because it differs
            from call to call.
        out_dtypes: the dtypes of the results; default: those of the gradients.
        counts: whether these are integers whose means are floats.
        names: the names of the tensors, for errors and the flight record; empty if they have none.
        compared: whether the names must equal those of the other processes, too.
        call: the collective. In a reduce-scatter the replicas of all processes own equal parts of
            each tensor; in an all-gather each owns a whole tensor.
        is_weighted: whether the replicas have weights, by which the pack multiplies.

    Raises:
        ValueError: ``reduction_groups`` is for another number of replicas.
        BackendUnavailableError: NCCL is missing and needed for two or more physical GPUs.
        CollectiveError: NCCL cannot connect the GPUs.
    """
    first = gradients[0][:: settings.num_words]
    plans = first[0].device.mesh_state.plans
    key = (
        call,
        settings,
        divisor,
        tuple([buffer.device.index for buffer in first]),
        tuple([replicas[0].shape for replicas in gradients]),
        tuple([id(replicas[0].dtype) for replicas in gradients]),  # hashing a dtype is slow
        None if out_dtypes is None else tuple([id(dtype) for dtype in out_dtypes]),
        counts,
        names,
        compared,
        is_weighted,
    )
    found: BatchPlan | None = plans.get(key)
    if found is not None:
        return found
    devices = tuple([buffer.device for buffer in first])
    dtypes = [replicas[0].dtype for replicas in gradients]
    num_shares = 1 if call == "all-reduce" else Replicas(devices).count
    cut = num_shares if call == "reduce-scatter" else 1
    share = [
        (replicas[0].size // cut, dtype, out_dtype)
        for replicas, dtype, out_dtype in zip(gradients, dtypes, out_dtypes or dtypes, strict=True)
    ]
    rows = [replicas[:: settings.num_words] for replicas in gradients]
    what = describe_batch(
        settings, rows, 1 if counts else divisor, out_dtypes,
        call="reduction" if call == "all-reduce" else call.replace("-", "_"),
        counts=counts, names=names, compared=compared, is_weighted=is_weighted,
    )  # fmt: skip
    plan = plan_shares(
        settings, devices, [share] * num_shares, what,
        call=call, divisor=divisor, counts=counts, names=names, is_weighted=is_weighted,
    )  # fmt: skip
    remember(plans, key, plan)
    return plan


def plan_shares(  # noqa: PLR0913  # all of it determines the plan
    settings: Settings,
    devices: tuple[Device, ...],
    shares: Sequence[Sequence[tuple[int, DType, DType]]],
    description: Description | None,
    *,
    call: CollectiveName,
    divisor: float | None = 1,
    counts: bool = False,
    names: tuple[str, ...] = (),
    is_weighted: bool = False,
) -> BatchPlan:
    """Plans a collective and compiles its kernels; see ``plan_batch``.

    Args:
        settings: the settings of the reduction.
        devices: the devices of this process's replicas.
        shares: for each replica of all processes the tensors of its share: size, dtype, and dtype
            of the result. For an all-reduce one share.
        description: see ``BatchPlan``.
        call: the collective.
        divisor: see ``plan_batch``.
        counts: see ``plan_batch``.
        names: see ``plan_batch``.
        is_weighted: see ``plan_batch``.
    """
    if call == "all-gather":  # copies each tensor in its own dtype
        settings = settings._replace(wire_dtype=None, num_words=1)
    algorithm = algorithm_of(settings, devices)
    for pair in dict.fromkeys([(dtype, out) for share in shares for _, dtype, out in share]):
        rehearse_reduction(
            settings, devices, *pair, call=call, counts=counts, is_weighted=is_weighted
        )
    flat: list[FlatPlan] = []
    first, num_before = Replicas(devices).first, 0
    for owner, share in enumerate(shares):
        place = (owner - first) * settings.num_words
        here = slice(place, place + 1) if owner >= first else slice(0)
        of_call = {
            "all-reduce": Share(receivers=slice(None, None, settings.num_words)),
            "reduce-scatter": Share(owner, receivers=here),
            "all-gather": Share(owner, senders=here),
        }
        sizes, pairs = [size for size, *_ in share], [(dtype, out) for _, dtype, out in share]
        flat += plan_packing(
            sizes, pairs, *settings[1:4], settings.wire_dtype,
            divides=divisor != 1, is_weighted=is_weighted, share=of_call[call],
            num_before=num_before,
        )  # fmt: skip
        num_before += len(share)
    packs = [(index, *pack) for index, each in enumerate(flat) for pack in each.packs]
    return BatchPlan(
        call, devices, algorithm, tuple(flat), divisor, counts, tuple(packs), description, names
    )


def remember(plans: dict[Hashable, Any], key: Hashable, plan: Any) -> None:
    """Keeps a plan of a mesh; at most ``MOST_PLANS`` of them."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan


def reduce_requests(
    settings: Settings,
    reduce_op: ReduceOp,
    requests: Sequence[Request],
    *,
    coalesce: bool,
    weighting: Weighting | None = None,
) -> list[tuple[Part, ...]]:
    """Reduces checked requests: dense values on the same devices in one batch, others singly.

    Results go into a request's ``out`` where possible; ``copy_to_out`` copies the others. With a
    ``weighting`` all values are dense, and their results go to their own devices.
    """
    dense_batches, others = batches_of(requests, reduce_op)
    batches = [
        plan_requests(settings, reduce_op, requests, *each, is_weighted=weighting is not None)
        for each in dense_batches
    ]
    by = {} if weighting is None else weighting.arguments
    for index in others:
        rehearse_alone(
            requests[index],
            (settings, reduce_op, coalesce),
            lambda dry, _: reduce_requests(settings, reduce_op, [dry], coalesce=coalesce)[0],
        )
    if others and (alike := with_all_reduced(requests)) is not requests:
        found_alike = reduce_requests(settings, reduce_op, alike, coalesce=coalesce)
        return copy_to_devices(requests, found_alike)
    results: dict[int, tuple[Part, ...]] = {}
    for (indices, counts), (gradients, plan) in zip(dense_batches, batches, strict=True):
        out = None  # all kernels are compiled
        if not counts and requests[indices[0]].out is not None:
            out = [requests[index].out or () for index in indices]
        reduced = reduce_batch(plan, gradients, out=out, positions=indices, **by)
        results |= zip(indices, reduced, strict=True)
    for index in others:
        home = requests[index].devices[0]
        with home.mesh_state.pack_scope(label_of(requests, [index])):
            results[index] = reduce_to_one(
                reduce_op, requests[index], home, coalesce=coalesce, exact=settings.exact
            )
    return [results[index] for index in range(len(requests))]


def plan_requests(
    settings: Settings,
    reduce_op: ReduceOp,
    requests: Sequence[Request],
    indices: Sequence[int],
    counts: bool,
    *,
    call: CollectiveName = "all-reduce",
    is_weighted: bool = False,
) -> tuple[list[tuple[Buffer, ...]], BatchPlan]:
    """Plans one batch and compiles all its kernels; raises if it cannot be reduced."""
    # No part is sparse; ``buffers`` would check again.
    gradients = cast("list[tuple[Buffer, ...]]", [requests[index].value.parts for index in indices])
    divisor: float | None = 1
    if reduce_op is ReduceOp.MEAN:
        divisor = None if is_weighted else Replicas.of(gradients[0]).count
    plan = plan_batch(
        settings,
        gradients,
        divisor=divisor,
        counts=counts,
        names=names_of(requests, indices),
        compared=requests[indices[0]].value._key is not None,  # keys are compared, names are not
        call=call,
        is_weighted=is_weighted,
    )
    return gradients, plan


def reduce_to_one(
    reduce_op: ReduceOp,
    request: Request,
    home: Device,
    *,
    coalesce: bool,
    accumulate: Accumulate | None = None,
    exact: bool = False,
) -> tuple[Part, ...]:
    """Adds one value on ``home`` and copies the result to the request's devices."""
    value, thread, mean = request.value, home.mesh_state.thread, reduce_op is ReduceOp.MEAN
    parts: Sequence[Part] = value.parts
    thread.phase = "all-reduce"
    if group_of(home).size > 1:  # dense values are all-reduced
        sparse = [part for part in parts if isinstance(part, IndexedSlices)]
        parts = slices_of_all(
            home, sparse, mean=mean, coalesce=coalesce,
            names=[value._name] * bool(value._name), compared=value._key is not None,
        )  # fmt: skip
    total = sum_on(
        home, parts, mean=mean, coalesce=coalesce, accumulate=accumulate, kind=value.kind,
        exact=exact,
    )  # fmt: skip
    thread.phase = "unpack"
    return copy_to_each(total, request.devices, keep=True)


def reduce_batch(
    plan: BatchPlan,
    gradients: Sequence[Sequence[Buffer]],
    *,
    consume: ExitStack | None = None,
    out: Sequence[Sequence[Buffer]] | None = None,
    positions: Sequence[int] | None = None,
    divisor: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[tuple[Buffer, ...]]:
    """Reduces one batch as planned: packs, all-reduces and unpacks one stage after another.

    Args:
        plan: the result of ``plan_batch`` for these gradients.
        gradients: see ``plan_batch``. For shares: the tensors of all shares, one share after the
            other, with one Buffer for each device that sends the tensor.
        consume: if not None, the gradients may be overwritten, and their memory used for the
            results. If they are, and anything fails between the first launch and the end of this
            ``ExitStack``, the devices are marked as failed, because sums and gradients are mixed.
        out: ``out[tensor][replica]``, the memory for the results, of their dtype; none overlaps
            another, or a gradient other than its own. For shares: one for each device that receives
            the tensor; an all-gather requires it. Default: new memory.
        positions: the numbers of the tensors in errors and the flight record; default: their
            indices.
        divisor: divides every sum, if the plan has no divisor.
        weights: the weight of each replica of this process, if the plan is for weights.

    Returns:
        ``[tensor][replica]``; all replicas of a tensor are equal. In the memory of ``out`` if it
        was passed. For a reduce-scatter only the owner's, or none if another process owns it.
    """
    algorithm, mesh_state = plan.algorithm, plan.devices[0].mesh_state
    overwrites = consume is not None and algorithm.in_place
    pack_buffers = lay_out(plan.flat, gradients, algorithm, targets=out, consume=overwrites)
    if consume is not None and overwrites and any([None in each.filling for each in pack_buffers]):
        consume.enter_context(mesh_state.fail_on_partial_write(plan.devices))
    positions = positions or range(len(gradients))
    packs = [(pack_buffers[index], start, stop) for index, start, stop in plan.packs]
    divisor = divisor if plan.divisor is None else plan.divisor
    assert divisor is not None, "the plan has none"
    over = 1 if plan.counts else divisor
    jobs: Sequence[Any] = [buffers.job(start, stop, over) for buffers, start, stop in packs]
    compared = _ALONE if plan.description is None else Replicas(plan.devices).call(plan.description)
    with mesh_state.launch_lock, compared:
        if plan.call == "all-reduce":
            jobs = algorithm.allocate(jobs)
        groups = _group_packs(plan, packs)
        # A single stage overlaps with nothing, so it needs no waits between two queues.
        queue: Queue = "transfer" if len(groups) > 1 else "compute"
        stages = [
            PackStage(
                _pack_info(packs, group, positions, plan.names),
                [packs[index] for index in group if packs[index][0].is_moved],
                _collective(plan, [jobs[index] for index in group], queue),
            )
            for group in groups
        ]
        into_packs = partial(moves_in, divisor=over, weights=weights, exact=algorithm.exact)
        _run_stages(plan, stages, into_packs)
    if out is not None:
        return [tuple(replicas) for replicas in out]
    sums = unpack(pack_buffers, [replicas[0].shape for replicas in gradients])
    if not plan.counts:
        return sums
    with mesh_state.pack_scope(PackInfo(positions, names=plan.names), plan.devices):
        return _means(plan, sums, divisor)


class PackStage(NamedTuple):
    """Packs that are packed, reduced and unpacked together.

    Attributes:
        label: the packs and their tensors, in the log.
        moved: the packs whose tensors are moved into or out of their flat buffers.
        steps: the steps of the collective that reduces all packs.
    """

    label: PackInfo
    moved: Sequence[Pack]
    steps: Steps


def _run_stages(
    plan: BatchPlan,
    stages: Sequence[PackStage],
    moves_of: Callable[[Sequence[Pack]], list[PackMove]],
) -> None:
    """Packs, all-reduces and unpacks all stages, so that transfers overlap with other work.

    Transfers run on the transfer queues; packing, sums and unpacking on the compute queues. A step
    of a collective after its first waits for transfers, and later work of the compute queue would
    wait too. So the next stage is packed before this step is submitted.
    """
    mesh_state = plan.devices[0].mesh_state
    thread = mesh_state.thread  # the log contains the phase
    waiting, running = iter(stages), list[PackStage]()
    while (new := next(waiting, None)) or running:
        if new is not None:
            running.insert(0, new)
        for stage in running.copy():
            with mesh_state.pack_scope(stage.label, plan.devices):
                if stage is new:
                    thread.phase = "pack"
                    move(moves_of(stage.moved))
                thread.phase = plan.call
                if next(stage.steps, stage) is stage:  # there was no step left
                    thread.phase = "unpack"
                    move(moves_out(stage.moved))
                    running.remove(stage)


def _collective(plan: BatchPlan, jobs: Sequence[Any], queue: Queue) -> Steps:
    """Returns the steps of the plan's collective for the jobs of one stage."""
    algorithm = plan.algorithm
    if plan.call == "all-reduce":
        return algorithm.all_reduce(jobs, queue)
    run = algorithm.all_gather if plan.call == "all-gather" else algorithm.reduce_scatter
    return map(run, [jobs])  # one step


def _means(
    plan: BatchPlan, sums: Sequence[tuple[Buffer, ...]], divisor: float
) -> list[tuple[Buffer, ...]]:
    """Divides sums of integers by the number of replicas."""
    plan.devices[0].mesh_state.thread.phase = plan.call
    means = iter(quotients([each for row in sums for each in row], divisor))
    return [tuple([next(means) for _ in row]) for row in sums]


def _group_packs(plan: BatchPlan, packs: Sequence[Pack]) -> list[list[int]]:
    """Returns the indices of the packs of each stage."""
    if len(packs) < 2 or plan.call != "all-reduce" or not _overlaps(plan):
        return [list(range(len(packs)))] if packs else []
    several = plan.description is not None  # processes
    # Processes may have different devices and buffers, but their stages must be equal.
    sizes = [
        ((stop - start) * buffers.plan.wire.itemsize, buffers.is_moved or several)
        for buffers, start, stop in packs
    ]
    return plan_stages(sizes, STAGE_BYTES)


def _overlaps(plan: BatchPlan) -> bool:
    """Whether packing can overlap with transfers."""
    if plan.description is None and len(by_physical(plan.devices)) > 1:
        return True
    return plan.algorithm.always_overlaps


def _pack_info(
    packs: Sequence[Pack],
    group: Sequence[int],
    positions: Sequence[int],
    names: Sequence[str],
) -> PackInfo:
    """Returns the packs of a stage, counted from 1, and their tensors."""
    if len(group) == len(packs):
        return PackInfo(positions, range(1, len(packs) + 1), len(packs), names)
    inside = dict.fromkeys(
        [
            buffers.plan.tensors[tensor]
            for buffers, start, stop in [packs[index] for index in group]
            for tensor in buffers.plan.pieces[start, stop].tensors
        ]
    )
    return PackInfo(
        tuple([positions[tensor] for tensor in inside]),
        tuple([index + 1 for index in group]),
        len(packs),
        tuple([names[tensor] for tensor in inside if names]),
    )


def rehearse_reduction(
    settings: Settings,
    devices: Sequence[Device],
    dtype: DType,
    out_dtype: DType,
    *,
    call: CollectiveName = "all-reduce",
    counts: bool = False,
    is_weighted: bool = False,
) -> None:
    """Compiles all kernels of ``reduce_batch`` for a dtype, and connects the devices for NCCL.

    Args:
        settings: the settings of the reduction.
        devices: the devices of the replicas.
        dtype: the dtype of the gradients.
        out_dtype: the dtype of the results.
        call: the collective.
        counts: whether these are integers whose means are floats.
        is_weighted: whether the replicas have weights.

    Raises:
        ValueError, BackendUnavailableError, CollectiveError: see ``plan_batch``.
    """
    algorithm_of(settings, devices).connect()
    key = ("reduce", call, settings, dtype, out_dtype, counts, is_weighted)
    of_all = settings, (dtype, out_dtype), call, counts, is_weighted
    compile_ahead(devices, key, lambda dry_run: _reduce_all(dry_run.devices_like(devices), *of_all))


def _reduce_all(
    devices: tuple[DryRunDevice, ...],
    settings: Settings,
    dtypes: tuple[DType, DType],
    call: CollectiveName,
    counts: bool,
    is_weighted: bool,
) -> None:
    """Reduces tensors that are alone and together, few and many bytes.

    In memory that peers cannot access, so that all copies and all sums occur.
    """
    num_shares = 1 if call == "all-reduce" else Replicas(devices).count
    # Weight 1 is packed, others are scaled. Only an exact sum uses a kernel for weight 0.
    rest, zero = [1.0] * (len(devices) - 1), [0.0] if settings.exact else []
    all_weights = [[each, *rest] for each in (2.0, *zero)] if is_weighted else [None]
    sizes = (1, SLICE_BYTES)
    for size, num_tensors, divisor, weights in product(sizes, (1, 2), (1, 2), all_weights):
        shares = [[(size, *dtypes)] * num_tensors] * num_shares
        plan = plan_shares(
            settings, devices, shares, None, call=call, divisor=divisor, counts=counts,
            is_weighted=is_weighted,
        )  # fmt: skip
        shape, slots = (size,), cast("tuple[DryRunDevice, ...]", plan.algorithm.senders)
        rows: dict[int, list[Buffer]] = {}
        outs: dict[int, list[Buffer]] = {}
        for flat in plan.flat:
            for tensor in flat.tensors:
                senders, receivers = slots[flat.share.senders], slots[flat.share.receivers]
                rows[tensor] = [device.foreign(shape, dtypes[0]) for device in senders]
                outs[tensor] = [device.foreign(shape, dtypes[1]) for device in receivers]
        gradients, out = [[each[tensor] for tensor in sorted(each)] for each in (rows, outs)]
        if not counts:
            reduce_batch(plan, gradients, out=out, weights=weights)
        if call != "all-gather":
            reduced = reduce_batch(plan, gradients, weights=weights)
            sums = [part for row in reduced for part in row]
            # ``copy_to_out`` does this.
            move(
                [
                    (part.device, ONE, [part.device.empty(shape, part.dtype)], [part])
                    for part in sums
                ]
            )


def algorithm_of(settings: Settings, devices: Sequence[Device]) -> Algorithm:
    """Returns the algorithm for replicas on these devices; raises if it cannot reduce them."""
    plans = devices[0].mesh_state.plans
    key = (
        "algorithm",
        settings.all_reduce_alg,
        settings.reduction_groups,
        settings.exact,
        settings.words,
        settings.num_words,
        tuple([device.index for device in devices]),
    )
    instance: Algorithm | None = plans.get(key)
    if instance is None:
        instance = _make_algorithm(settings, devices)
        remember(plans, key, instance)
    return instance


def _make_algorithm(settings: Settings, devices: Sequence[Device]) -> Algorithm:
    replicas = Replicas(devices)
    is_alone = replicas.group.size == 1
    if settings.exact:
        if is_alone:
            return ExactCopy(devices, settings.num_words)
        return ExactAcrossProcesses(devices, settings.words, settings.num_words)
    algorithm, groups = ALGORITHMS[settings.all_reduce_alg], settings.reduction_groups
    # nccl defines no order, so over processes use the groups that send the fewest bytes
    if groups == "processes" or not (is_alone or algorithm.has_groups):
        groups = process_groups(replicas.counts)
    if not is_alone:
        by_library = algorithm is Nccl and replicas.group.collective is not None
        algorithm = NcclAcrossProcesses if by_library else AcrossProcesses
    return algorithm(devices, groups)
