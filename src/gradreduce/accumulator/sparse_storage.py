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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradreduce import ops
from gradreduce.arrays import snapshots
from gradreduce.arrays.caller_streams import SuspendedScope
from gradreduce.arrays.convert import host_array, is_array, shape_and_dtype
from gradreduce.arrays.distributed import Part, PerReplica, ReduceOp, buffer_of
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices, coalesced
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    by_physical,
    compatible,
    flat_layout,
    fork_streams,
    join_streams,
    to_accessible,
)
from gradreduce.errors import InvalidArgumentError, about, brief
from gradreduce.ops import (
    Divisor,
    Indices,
    RowIndex,
    Segments,
    expand_divisors,
    joined_indices,
    merged_row_index,
    plan_segments,
)
from gradreduce.reduce.aggregation import concatenated_rows
from gradreduce.reduce.all_reduce_ops import is_all_reduce
from gradreduce.reduce.arguments import Request
from gradreduce.reduce.one_device import by_gpu, copied_to

from .state import (
    AccumulatorState,
    Addend,
    Additions,
    PendingGradient,
    SparseGradient,
    SparseSum,
    Storage,
)
from .validate import check_dtype, to_sum_device

_KEYS = ("indices", "num_touches", "values")  # of a partial sum in a checkpoint


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
    values: Any = None

    @property
    def is_in_place(self) -> bool:
        """Whether the memory of the previous sum is overwritten."""
        return self.total is not None and self.values is self.total.values


class SparseStorage(Storage):
    """Stores the rows that any gradient touched, in the accumulate dtype, in order of arrival."""

    sparse = True
    format = "gradreduce sparse accumulator 1"

    def prepare(self, state: AccumulatorState) -> None:
        """See ``Storage``."""
        acc_dtype = accumulate_dtype(state.dtype)
        prepare_gradient(state, state.dtype)
        for device in state.devices:
            ops.prepare_pack(device, acc_dtype, acc_dtype)
            ops.prepare_all_sum(device, state.dtype, state.dtype)
            ops.prepare_segment_sum(device, state.dtype, acc_dtype)

    def checked(self, state: AccumulatorState, grad: Any, cast: bool) -> IndexedSlices:
        """See ``Storage``; only IndexedSlices, possibly with more dimensions."""
        if not isinstance(grad, IndexedSlices):
            raise TypeError(
                f"a SparseConditionalAccumulator expects IndexedSlices, got {type(grad).__name__}"
            )
        check_dtype(state, grad.dtype, cast)
        if state.shape:
            _check_shape(state.shape, grad)
        return grad

    def converted(self, state: AccumulatorState, grad: Any, cast: bool) -> Addend:
        """See ``Storage``; the first extent is the accumulator's, if known."""
        slices = self.checked(state, grad, cast)
        index, rows = to_sum_device(state, slices.values)
        first = UNKNOWN if slices.dense_shape is None else slices.dense_shape[0]
        if state.shape and state.shape[0] is not None:
            first = state.shape[0]
        segments = plan_segments(slices.indices)
        return index, SparseGradient(rows, segments, (first, *rows.shape[1:]))

    def prepare_parts(self, state: AccumulatorState, parts: Sequence[Addend]) -> None:
        """See ``Storage``."""
        for dtype in dict.fromkeys([gradient.dtype for _, gradient in parts]):
            if dtype != state.dtype:
                prepare_gradient(state, dtype)

    def check_sum_shape(self, gradient: Any, wanted: tuple[int, ...]) -> None:
        """See ``Storage``; also checks the indices."""
        shape, indices = gradient.shape, gradient.segments.indices  # unique and ascending
        known = (None if UNKNOWN in (shape[0], wanted[0]) else wanted[0], *wanted[1:])
        if not compatible(shape, known):
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(wanted)}, got {list(shape)}"
            )
        if wanted[0] != UNKNOWN and len(indices) and indices[-1] >= wanted[0]:
            raise InvalidArgumentError(
                f"index {indices[-1]} is not below dense_shape[0] = {wanted[0]} of the first "
                "gradient in the sum"
            )

    def additions(self, pending_gradients: Sequence[PendingGradient]) -> Additions:
        """See ``Storage``; each GPU adds the n-th gradients of all sums in one launch."""
        sums: dict[tuple[AccumulatorState, int], _GrowingSum] = {}
        for state, parts, _ in pending_gradients:
            for index, gradient in parts:
                assert isinstance(gradient, SparseGradient)
                device, total = state.devices[index], state.totals[index]
                each = sums.get((state, index))
                if each is None:
                    # A gradient without rows launches nothing that would check it.
                    device.mesh_state.check_usable(device)
                    slots = RowIndex.none() if total is None else total.slots
                    each = sums[state, index] = _GrowingSum(state, index, device, total, slots)
                values = to_accessible(device, gradient.values)
                each.slots, into = each.slots.touched(gradient.segments.indices)
                each.steps.append((values, gradient.segments, into))
        growing = list(sums.values())
        _allocate_sums(growing)
        fresh = [each for each in growing if not each.is_in_place]
        later = [each for each in growing if each.is_in_place]
        return Additions(
            _launches(fresh),
            _launches(later),
            [each.device for each in later],
            [(each.state, each.device_index, SparseSum(each.slots, each.values))
             for each in growing],
        )  # fmt: skip

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``; the sums are unchanged."""
        taken = {state: _reduced(state) for state in states if _has_custom_ops(state)}
        ours = [state for state in states if state not in taken]
        return taken | (_merged(ours) if ours else {})

    def fits(self, shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
        """See ``Storage``; the first extent may be unknown, and there may be more."""
        wanted = wanted or (None,)
        first = shape[: len(wanted)]
        return UNKNOWN not in shape[1:] and compatible(first, wanted)

    def save(self, total: Any) -> Callable[[float | None], Any]:
        """See ``Storage``; a dict of arrays, in the order of the indices."""
        slots, copy = total.slots, snapshots.copied(total.rows)

        def download(end: float | None) -> dict[str, Any]:
            rows = snapshots.downloaded(copy, end)[slots.rows]
            found = (slots.indices.copy(), slots.num_touches(), rows)
            return dict(zip(_KEYS, found, strict=True))

        return download

    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], SparseSum]:
        """See ``Storage``; the new memory has no spare capacity."""
        snapshots.check_keys(name, saved, _KEYS)
        values, acc_dtype = saved["values"], accumulate_dtype(dtype)
        try:
            slices = IndexedSlices(values, saved["indices"], shape)
            touches = joined_indices([host_array(saved["num_touches"])])
        except (TypeError, ValueError) as error:
            raise about(name, error) from None
        indices = slices.indices
        if slices.dtype != acc_dtype or not is_array(values):
            raise ValueError(f"{name}['values'] is {slices.dtype}; expected {acc_dtype}")
        if not (indices[1:] > indices[:-1]).all():
            raise ValueError(f"{name}['indices'] must be strictly ascending, got {indices}")
        if touches.dtype.kind not in "iu" or touches.shape != indices.shape:
            raise ValueError(
                f"{name}['num_touches'] must have one integer for each of {len(indices)} indices"
            )
        if len(indices) and not 1 <= touches.min() <= touches.max() <= count:
            raise ValueError(f"{name}['num_touches'] must be from 1 to {count}, got {touches}")
        slots, host = RowIndex.of(indices, touches.astype("int64")), host_array(values)
        return lambda device: SparseSum(slots, device.upload(host))


SPARSE = SparseStorage()


def prepare_gradient(state: AccumulatorState, gradient: DType) -> None:
    """Compiles the kernels for gradients of one dtype, before any lock is held."""
    for device in state.devices:
        ops.prepare_segment_sum(device, accumulate_dtype(state.dtype), gradient)


def _check_shape(wanted: tuple[int | None, ...], slices: IndexedSlices) -> None:
    """Checks slices against the accumulator's shape, which may have fewer dimensions."""
    if slices.dense_shape is not None:
        first, *row = slices.dense_shape
        _check_extents("shape", wanted, (None if first == UNKNOWN else first, *row))
    if wanted[0] is not None and len(slices.indices):
        last = int(slices.indices.max())
        if last >= wanted[0]:
            raise InvalidArgumentError(
                f"index of slice {int(slices.indices.argmax())} exceeded limits of shape; index is "
                f"{last} exceeded {wanted[0]}"
            )
    rows, _ = shape_and_dtype(slices.values)
    _check_extents("values", wanted, (None, *rows[1:]))


def _check_extents(
    what: str, wanted: tuple[int | None, ...], shape: tuple[int | None, ...]
) -> None:
    """Raises ``InvalidArgumentError`` if known extents differ or dimensions are missing."""
    if len(shape) < len(wanted):
        raise InvalidArgumentError(f"expected {what} rank at least {len(wanted)}, got {len(shape)}")
    for index, (extent, known) in enumerate(zip(shape, wanted, strict=False)):
        if extent is not None and known is not None and extent != known:
            raise InvalidArgumentError(f"expected {what} dim {index} to be {known}, got {extent}")


def _allocate_sums(growing: Sequence[_GrowingSum]) -> None:
    """Allocates memory for new rows; copies the rows of a sum that outgrows its memory."""
    outs: list[Buffer] = []
    moved: list[Buffer] = []
    for each in growing:
        total, needed = each.total, each.slots.num_rows
        existing = 0 if total is None else total.values.shape[0]
        if total is not None and needed <= existing:
            each.values = total.values
            continue
        capacity = max(needed, 2 * existing)
        limit = each.state.shape[0] if each.state.shape else None
        if limit is not None:
            capacity = min(capacity, limit)
        shape = (capacity, *each.steps[0][0].shape[1:])
        each.values = each.device.empty(shape, accumulate_dtype(each.state.dtype))
        if total is not None and total.slots.num_rows:
            moved.append(total.rows)
            outs.append(each.values.view(0, total.rows.shape))
    for indices, leader in by_gpu(outs):
        rows = [moved[index] for index in indices]
        ops.pack([outs[index] for index in indices], rows, device=leader)


def _launches(growing: Sequence[_GrowingSum]) -> list[Callable[[], None]]:
    """Launches that add the n-th gradients of all sums: one for each n and GPU."""
    launches: list[Callable[[], None]] = []
    for wave in range(max([len(each.steps) for each in growing], default=0)):
        present = [each for each in growing if wave < len(each.steps)]
        for indices in by_physical([each.device for each in present]).values():
            sharing = [present[index] for index in indices]
            steps = [each.steps[wave] for each in sharing]
            devices = [each.device for each in sharing] + [rows.device for rows, _, _ in steps]
            add = ops.segment_sum_command(
                [each.values for each in sharing],
                [rows for rows, _, _ in steps],
                [segments for _, segments, _ in steps],
                into=[into for _, _, into in steps],
                device=devices[0],
            )
            launches.append(partial(_launch, devices, add))
    return launches


def _launch(devices: Sequence[Device], add: Callable[[], None]) -> None:
    join_streams(devices[0], devices)
    add()
    fork_streams(devices[0], devices)


def _has_custom_ops(state: AccumulatorState) -> bool:
    """Whether a ``CrossDeviceOps`` other than this package's all-reduce merges its sums."""
    return state.over_mesh and not is_all_reduce(state.cross_device_ops)


def _merged_plan(state: AccumulatorState) -> tuple[Segments, Divisor]:
    """Plans how the rows of a state's sums are merged, and by what they are divided."""
    slots = [total.slots for total in state.totals if total is not None]
    return merged_row_index(slots, mean=state.reduction_type == "MEAN")


def _reduced(state: AccumulatorState) -> tuple[IndexedSlices, ...]:
    """Merges sums by ``cross_device_ops``, then sorts and divides on each device."""
    plan, divisor = _merged_plan(state)
    rows = [_as_slices(state, index) for index in range(len(state.devices))]
    value = PerReplica.of(rows, "native", name=state.tensor or state.name)
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
    if total is None:
        shape = (0, *(state.sum_shape or ())[1:])
        values = state.devices[device_index].empty(shape, accumulate_dtype(state.dtype))
        total = SparseSum(RowIndex.none(), values)
    return IndexedSlices.of(total.rows, total.slots.by_row, state.sum_shape)


def _merged(states: Sequence[AccumulatorState]) -> dict[AccumulatorState, tuple[Part, ...]]:
    """Merges the sums of each state by one launch on its first device."""
    plans, divisors = zip(*[_merged_plan(state) for state in states], strict=True)
    values = _gathered_rows(states)
    shapes = [
        (plan.num_segments, *rows.shape[1:]) for rows, plan in zip(values, plans, strict=True)
    ]
    groups: dict[tuple[tuple[Device, ...], DType], list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault((state.devices, state.dtype), []).append(index)
    outs: dict[int, Buffer] = {}
    flat_buffers = []
    for (devices, dtype), indices in groups.items():
        layout = flat_layout([math.prod(shapes[index]) for index in indices], dtype.itemsize)
        flat = devices[0].empty((layout.size,), dtype)
        offsets = list(zip(indices, layout.offsets, strict=True))
        outs.update((index, flat.view(offset, shapes[index])) for index, offset in offsets)
        flat_buffers.append((flat, devices, offsets))
    merged = [outs[index] for index in range(len(states))]
    coalesced(values, plans, outs=merged, divisors=expand_divisors(divisors, plans))
    found: list[list[Buffer]] = [[] for _ in states]
    for flat, devices, offsets in flat_buffers:
        for copy in copied_to(flat, devices, keep=True):
            for index, offset in offsets:
                found[index].append(buffer_of(copy).view(offset, shapes[index]))
    return {
        state: tuple([IndexedSlices.of(rows, plan.indices, state.sum_shape) for rows in here])
        for state, plan, here in zip(states, plans, found, strict=True)
    }


def _gathered_rows(states: Sequence[AccumulatorState]) -> list[Buffer]:
    """The rows of each state's sums back to back on its first device; copied if not there."""
    rows = [[total.rows for total in state.totals if total is not None] for state in states]
    found = [parts[0] for parts in rows]
    scattered = [
        index
        for index, parts in enumerate(rows)
        if len(parts) > 1 or parts[0].device is not states[index].devices[0]
    ]
    groups = [(states[index].devices[0], rows[index]) for index in scattered]
    for index, whole in zip(scattered, concatenated_rows(groups), strict=True):
        found[index] = whole
    return found
