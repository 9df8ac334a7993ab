"""Partial sums of sparse gradients: adds rows, and merges and divides them at a take.

A sum holds the rows that any gradient touched, in order of arrival (``ops/row_index.py``). One
launch adds to existing rows and appends new ones; when memory runs out, the rows are copied into
twice as much. At a take, one launch merges the rows of all sums in the order of their indices, and
divides each by the number of gradients that touched it. Over a mesh, the rows of all devices are
first copied to the first one, in mesh order; the results are packed and copied once to each GPU. A
``CrossDeviceOps`` other than an all-reduce of this package does this in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradreduce import ops
from gradreduce.arrays.caller_streams import SuspendedScope
from gradreduce.arrays.distributed import Part, PerReplica, ReduceOp, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesced
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    by_physical,
    flat_layout,
    fork_streams,
    join_streams,
    to_accessible,
)
from gradreduce.errors import brief
from gradreduce.ops import (
    Indices,
    RowIndex,
    Segments,
    expand_divisors,
    merged_row_index,
    plan_segments,
)
from gradreduce.reduce.aggregation import concatenated_rows
from gradreduce.reduce.all_reduce_ops import is_all_reduce
from gradreduce.reduce.arguments import Request
from gradreduce.reduce.one_device import broadcast_values

from .state import AccumulatorState, PendingGradient, SparseGradient, SparseSum


def prepare_sparse(state: AccumulatorState) -> None:
    """Compiles the kernels for gradients of the accumulator's dtype, and for takes."""
    acc_dtype = accumulate_dtype(state.dtype)
    prepare_gradient(state, state.dtype)
    for device in state.devices:
        ops.prepare_pack(device, acc_dtype, acc_dtype)
        ops.prepare_all_sum(device, state.dtype, state.dtype)
        ops.prepare_segment_sum(device, state.dtype, acc_dtype)


def prepare_gradient(state: AccumulatorState, gradient: DType) -> None:
    """Compiles the kernels for gradients of one dtype, before any lock is held."""
    for device in state.devices:
        ops.prepare_segment_sum(device, accumulate_dtype(state.dtype), gradient)


@dataclass(eq=False)
class _GrowingSum:
    """A partial sum, and the gradients that a call adds to it.

    Attributes:
        state: the accumulator.
        device_index: index of the device in ``state.devices``.
        device: that device.
        total: the sum before the call; None without.
        slots: its row index after the call.
        steps: for each gradient its rows, accessible to the device, which of them have the same
            index, and the rows of the sum that they are added to.
        values: the memory of the sum after the call.
    """

    state: AccumulatorState
    device_index: int
    device: Device
    total: SparseSum | None
    slots: RowIndex
    steps: list[tuple[Buffer, Segments, Indices]] = field(default_factory=list)
    values: Buffer | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the memory of the previous sum is overwritten."""
        return self.total is not None and self.values is self.total.values


class SparseAdditions:
    """Prepared additions of sparse gradients to partial sums: memory is allocated.

    If the constructor fails, nothing has changed. Call ``launch_out_of_place``, then
    ``launch_in_place``; then ``totals`` returns the new sums.

    Args:
        pending_gradients: of sparse accumulators; all locks are held.

    Attributes:
        kept: devices of the sums that ``launch_in_place`` overwrites.
    """

    def __init__(self, pending_gradients: Sequence[PendingGradient]) -> None:
        self._sums: dict[tuple[AccumulatorState, int], _GrowingSum] = {}
        for pending_gradient in pending_gradients:
            for index, gradient in pending_gradient.parts:
                assert isinstance(gradient, SparseGradient)
                self._plan(pending_gradient.state, index, gradient)
        growing = list(self._sums.values())
        _allocate_sums(growing)
        launches: list[tuple[bool, Callable[[], None]]] = []
        for wave in range(max((len(each.steps) for each in growing), default=0)):
            made = _additions([each for each in growing if wave < len(each.steps)], wave)
            launches += sorted(made, key=lambda launch: launch[0])
        # A new sum may share a launch with one in place; then its next gradient must follow it.
        apart = next((at for at, (writes, _) in enumerate(launches) if writes), len(launches))
        self._apart = [launch for _, launch in launches[:apart]]
        self._in_place = [launch for _, launch in launches[apart:]]
        self.kept = [each.device for each in growing] if self._in_place else []

    def _plan(self, state: AccumulatorState, device_index: int, gradient: SparseGradient) -> None:
        device = state.devices[device_index]
        growing = self._sums.get((state, device_index))
        if growing is None:
            device.mesh_state.check_usable(
                device
            )  # a gradient without rows launches nothing that would check
            total = state.totals[device_index]
            assert not isinstance(total, Buffer)
            slots = RowIndex.none() if total is None else total.slots
            growing = self._sums[state, device_index] = _GrowingSum(
                state, device_index, device, total, slots
            )
        values = to_accessible(device, gradient.values)
        growing.slots, into = growing.slots.touched(gradient.segments.indices)
        growing.steps.append((values, gradient.segments, into))

    def launch_out_of_place(self) -> None:
        """Writes new sums; on error, the existing sums are unchanged."""
        for launch in self._apart:
            launch()

    def launch_in_place(self) -> None:
        """Adds to existing sums; after an error their contents are undefined."""
        for launch in self._in_place:
            launch()

    def totals(self) -> list[tuple[AccumulatorState, int, Buffer | SparseSum | None]]:
        """Each sum that changed, with its accumulator and device index."""
        return [
            (each.state, each.device_index, SparseSum(each.slots, each.values))
            for each in self._sums.values()
            if each.values is not None
        ]


def _allocate_sums(growing: Sequence[_GrowingSum]) -> None:
    """Allocates memory for new rows; copies the rows of a sum that outgrows its memory."""
    moved: list[tuple[Device, Buffer, Buffer]] = []
    for each in growing:
        total, needed = each.total, each.slots.num_rows
        if total is not None and needed <= total.values.shape[0]:
            each.values = total.values
            continue
        row = each.steps[0][0].shape[1:]
        capacity = needed if total is None else max(needed, 2 * total.values.shape[0])
        limit = each.state.shape[0] if each.state.shape else None
        if limit is not None:
            capacity = min(capacity, limit)
        each.values = each.device.empty((capacity, *row), accumulate_dtype(each.state.dtype))
        if total is not None and total.slots.num_rows:
            rows = total.rows
            moved.append((each.device, each.values.view(0, rows.shape), rows))
    for indices in by_physical([device for device, _, _ in moved]).values():
        sharing = [moved[index] for index in indices]
        devices = [device for device, _, _ in sharing]
        join_streams(devices[0], devices)
        ops.pack(
            [out for _, out, _ in sharing], [rows for _, _, rows in sharing], device=devices[0]
        )
        fork_streams(devices[0], devices)


def _additions(growing: Sequence[_GrowingSum], wave: int) -> list[tuple[bool, Callable[[], None]]]:
    """One launch for each GPU: whether it writes in place, and the function to call."""
    launches = []
    for indices in by_physical([each.device for each in growing]).values():
        sharing = [growing[index] for index in indices]
        steps = [each.steps[wave] for each in sharing]
        devices = [each.device for each in sharing] + [rows.device for rows, _, _ in steps]
        add = ops.segment_sum_command(
            [each.values for each in sharing if each.values is not None],
            [rows for rows, _, _ in steps],
            [segments for _, segments, _ in steps],
            into=[into for _, _, into in steps],
            device=devices[0],
        )
        launches.append(
            (any(each.is_in_place for each in sharing), _with_stream_waits(devices, add))
        )
    return launches


def _with_stream_waits(devices: Sequence[Device], add: Callable[[], None]) -> Callable[[], None]:
    def launch() -> None:
        join_streams(devices[0], devices)
        add()
        fork_streams(devices[0], devices)

    return launch


def take_sparse(states: Sequence[AccumulatorState]) -> list[tuple[IndexedSlices, ...]]:
    """Returns the gradient of each state on each of its devices; the sums are unchanged.

    Args:
        states: of sparse accumulators, each with at least one gradient.
    """
    taken = {state: _reduced(state) for state in states if _has_custom_ops(state)}
    ours = [state for state in states if state not in taken]
    taken.update(zip(ours, _merged(ours), strict=True))
    return [taken[state] for state in states]


def _has_custom_ops(state: AccumulatorState) -> bool:
    """Whether a ``CrossDeviceOps`` other than this package's all-reduce merges its sums."""
    return state.over_mesh and not is_all_reduce(state.cross_device_ops)


def _reduced(state: AccumulatorState) -> tuple[IndexedSlices, ...]:
    """Merges sums by ``cross_device_ops``, then sorts and divides on each device."""
    sums = [total for total in state.totals if isinstance(total, SparseSum)]
    mean = state.reduction_type == "MEAN"
    plan, divisor = merged_row_index([total.slots for total in sums], mean=mean)
    rows = [_as_slices(state, index) for index in range(len(state.devices))]
    value = PerReplica.of(rows, "native")
    with SuspendedScope():  # it may run a user's class
        (parts,) = state.cross_device_ops.reduce_batch(
            ReduceOp.SUM, [Request(value, state.devices)], coalesce=True
        )
    slices = [part for part in parts if isinstance(part, IndexedSlices)]
    plans = [plan_segments(part.indices) for part in slices]
    wanted = [plan.indices.tolist()] * len(state.devices)
    if [each.indices.tolist() for each in plans] != wanted:
        raise ValueError(
            f"cross_device_ops={brief(state.cross_device_ops)} returned other row indices than "
            "the partial sums have"
        )
    outs = [
        device.empty((plan.num_segments, *rows[0].values.shape[1:]), state.dtype)
        for device in state.devices
    ]
    coalesced([part.values for part in slices], plans, outs=outs, divisors=[divisor] * len(outs))
    return tuple([IndexedSlices.of(out, plan.indices, state.sum_shape) for out in outs])


def _as_slices(state: AccumulatorState, device_index: int) -> IndexedSlices:
    """The partial sum of a device as IndexedSlices, rows in storage order."""
    total = state.totals[device_index]
    if not isinstance(total, SparseSum):
        assert state.sum_shape is not None  # it holds gradients
        shape = (0, *state.sum_shape[1:])
        none = state.devices[device_index].empty(shape, accumulate_dtype(state.dtype))
        return IndexedSlices.of(none, RowIndex.none().indices, state.sum_shape)
    return IndexedSlices.of(total.rows, total.slots.by_row, state.sum_shape)


def _merged(states: Sequence[AccumulatorState]) -> list[tuple[IndexedSlices, ...]]:
    """Merges the sums of each state by one launch on its first device."""
    sums = [[total for total in state.totals if isinstance(total, SparseSum)] for state in states]
    plans, divisors = [], []
    for state, totals in zip(states, sums, strict=True):
        mean = state.reduction_type == "MEAN"
        segments, by = merged_row_index([total.slots for total in totals], mean=mean)
        plans.append(segments)
        divisors.append(by)
    values = _gather_rows(states, sums)
    shapes = [
        (plan.num_segments, *rows.shape[1:]) for rows, plan in zip(values, plans, strict=True)
    ]
    outs, flat_buffers = _allocate_results(states, shapes)
    coalesced(values, plans, outs=outs, divisors=expand_divisors(divisors, plans))
    found: list[Sequence[Part]] = [(out,) for out in outs]
    for flat, offsets in flat_buffers:
        copies = broadcast_values(flat, states[next(iter(offsets))].devices)
        for index, offset in offsets.items():
            found[index] = [buffer_of(copy).view(offset, shapes[index]) for copy in copies]
    return [
        tuple([IndexedSlices.of(rows, plan.indices, state.sum_shape) for rows in here])
        for state, plan, here in zip(states, plans, found, strict=True)
    ]


def _allocate_results(
    states: Sequence[AccumulatorState], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Buffer], list[tuple[Buffer, dict[int, int]]]]:
    """Allocates memory for each result on the first device of its accumulator.

    Returns:
        The results; and each flat buffer of results that go to the same devices, with the offset
        of each result by the index of its accumulator.
    """
    outs: dict[int, Buffer] = {}
    groups: dict[tuple[tuple[Device, ...], DType], list[int]] = {}
    for index, state in enumerate(states):
        if state.over_mesh:
            groups.setdefault((state.devices, state.dtype), []).append(index)
        else:
            outs[index] = state.devices[0].empty(shapes[index], state.dtype)
    flat_buffers = []
    for (devices, dtype), indices in groups.items():
        layout = flat_layout([math.prod(shapes[index]) for index in indices], dtype.itemsize)
        flat = devices[0].empty((layout.size,), dtype)
        offsets = dict(zip(indices, layout.offsets, strict=True))
        flat_buffers.append((flat, offsets))
        outs.update((index, flat.view(offset, shapes[index])) for index, offset in offsets.items())
    return [outs[index] for index in range(len(states))], flat_buffers


def _gather_rows(
    states: Sequence[AccumulatorState], sums: Sequence[Sequence[SparseSum]]
) -> list[Buffer]:
    """Copies the rows of each state's sums back to back to its first device."""
    there: list[Buffer | None] = []
    groups: list[tuple[Device, list[Buffer]]] = []
    for state, totals in zip(states, sums, strict=True):
        rows = [total.rows for total in totals]
        if len(rows) == 1 and rows[0].device is state.devices[0]:
            there.append(rows[0])
        else:
            there.append(None)
            groups.append((state.devices[0], rows))
    gathered = iter(concatenated_rows(groups))
    return [next(gathered) if rows is None else rows for rows in there]
