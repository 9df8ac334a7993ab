"""Partial sums of dense gradients: adds gradients with one launch for each GPU.

The first gradient after a take is copied with a cast into new memory, later ones are added in
place: nothing is zeroed, and the host does not wait for a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradreduce import ops
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

from .state import AccumulatorState, PendingGradient, SparseSum


def prepare_pending(devices: Sequence[Device], dtype: DType, gradient: DType) -> None:
    """Compiles the kernels for gradients of one dtype, before any lock is held.

    Args:
        devices: of the partial sums.
        dtype: of the accumulator.
        gradient: of the gradients.
    """
    acc_dtype = accumulate_dtype(dtype)
    for device in devices:
        ops.prepare_add_n(device, acc_dtype, gradient, 1)
        ops.prepare_accumulate_n(device, acc_dtype, gradient)


def prepare_parts(pending_gradient: PendingGradient) -> None:
    """Compiles kernels for other dtypes, or for several gradients of one sum."""
    acc_dtype = accumulate_dtype(pending_gradient.state.dtype)
    for index, gradients in _by_device(pending_gradient).items():
        device = pending_gradient.state.devices[index]
        ops.prepare_add_n(
            device, acc_dtype, gradients[0].dtype, _num_together(acc_dtype, gradients)
        )
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            ops.prepare_accumulate_n(device, acc_dtype, dtype)


@dataclass(slots=True)
class _Addition:
    """Gradients to add to one partial sum.

    Attributes:
        state: the accumulator.
        device_index: index of the device in ``state.devices``.
        device: that device.
        gradients: accessible to the device; at least one, in the order of addition.
        total: the partial sum; a new one is uninitialized until its first launch.
    """

    state: AccumulatorState
    device_index: int
    device: Device
    gradients: list[Buffer]
    total: Buffer | None


_Kernel = Callable[..., None]
# A partial sum, and the gradients that one launch adds to it.
_Row = tuple[_Addition, list[Buffer]]


class DenseAdditions:
    """Prepared additions of dense gradients to partial sums: memory is allocated.

    First gradients are copied, later ones added; devices on one GPU share launches. Several
    gradients for one sum are added in order, with the same bits as one call for each: in one launch
    if they have one dtype and the sum its accumulate dtype, else one after the other.

    If the constructor fails, nothing has changed. Call ``launch_out_of_place``, then
    ``launch_in_place``; then ``totals`` returns the new sums.

    Args:
        pending_gradients: of dense accumulators; all locks are held.

    Attributes:
        kept: devices of the sums that ``launch_in_place`` overwrites.
    """

    __slots__ = ("_additions", "_fresh", "_rows", "kept")

    def __init__(self, pending_gradients: Sequence[PendingGradient]) -> None:
        self._additions: list[_Addition] = []
        self._rows: list[_Row] = []
        self.kept: list[Device] = []
        self._fresh: list[_Addition] = []
        for pending_gradient in pending_gradients:
            state = pending_gradient.state
            for index, gradients in _by_device(pending_gradient).items():
                device = state.devices[index]
                total = state.totals[index]
                assert not isinstance(total, SparseSum)
                accessible = [to_accessible(device, gradient) for gradient in gradients]
                addition = _Addition(state, index, device, accessible, total)
                self._additions.append(addition)
                if total is None:
                    self._fresh.append(addition)
                else:
                    self._rows.append((addition, accessible))
                    self.kept.append(device)
        if self._fresh:
            _allocate_sums(self._fresh)

    def launch_out_of_place(self) -> None:
        """Writes new sums; on error, the existing sums are unchanged."""
        if self._fresh:
            self._rows = _start(self._fresh) + self._rows

    def launch_in_place(self) -> None:
        """Adds to existing sums; after an error their contents are undefined."""
        if self._rows:
            _accumulate(self._rows)

    def totals(self) -> list[tuple[AccumulatorState, int, Buffer | SparseSum | None]]:
        """Each sum that changed, with its accumulator and device index."""
        return [(each.state, each.device_index, each.total) for each in self._additions]


def _by_device(pending_gradient: PendingGradient) -> dict[int, list[Buffer]]:
    """The gradients for each partial sum, in the order of the replicas."""
    found: dict[int, list[Buffer]] = {}
    for index, gradient in pending_gradient.parts:
        assert isinstance(gradient, Buffer)
        found.setdefault(index, []).append(gradient)
    return found


def _start(fresh: Sequence[_Addition]) -> list[_Row]:
    """Writes new sums from their first gradients; returns the additions left to do."""
    first: list[_Row] = []
    rest: list[_Row] = []
    for each in fresh:
        gradients = each.gradients
        if len(gradients) == 1:
            first.append((each, gradients))
            continue
        count = _num_together(accumulate_dtype(each.state.dtype), gradients)
        first.append((each, gradients[:count]))
        if count < len(gradients):
            rest.append((each, gradients[count:]))
    _add(ops.add_n, ops.cast_unchecked, first)
    return rest


def _num_together(acc_dtype: DType, gradients: Sequence[Buffer]) -> int:
    """How many of the first gradients one launch of ``add_n`` may sum.

    ``add_n`` accumulates in the accumulate dtype of its inputs; if the sum has another dtype, the
    first gradient is cast alone.
    """
    dtype = gradients[0].dtype
    if len(gradients) == 1 or accumulate_dtype(dtype) != acc_dtype:
        return 1
    return len(list(itertools.takewhile(lambda each: each.dtype == dtype, gradients)))


def _accumulate(rows: Sequence[_Row]) -> None:
    """Adds to existing sums, with one launch for each run of gradients of one dtype."""
    if all([len(gradients) == 1 for _, gradients in rows]):
        _add(ops.accumulate_n, ops.accumulate_unchecked, rows)
        return
    runs = [
        (each, [list(run) for _, run in itertools.groupby(gradients, lambda buffer: buffer.dtype)])
        for each, gradients in rows
    ]
    for turn in range(max(len(found) for _, found in runs)):
        _add(
            ops.accumulate_n,
            ops.accumulate_unchecked,
            [(each, found[turn]) for each, found in runs if turn < len(found)],
        )


def _add(together: _Kernel, alone: _Kernel, rows: Sequence[_Row]) -> None:
    """Adds with one launch for each GPU, dtype and number of gradients.

    Args:
        together: adds a list of gradients to each sum.
        alone: adds one gradient to each sum, without validation.
        rows: the sums and their gradients.
    """
    for indices in by_physical([addition.device for addition, _ in rows]).values():
        totals: list[Buffer | None] = []
        terms: list[list[Buffer]] = []
        flat: list[Buffer] = []
        involved: list[Device] = []
        for index in indices:
            addition, gradients = rows[index]
            involved.append(addition.device)
            totals.append(addition.total)
            terms.append(gradients)
            flat += gradients
        leader = involved[0]
        involved += [gradient.device for gradient in flat]
        join_streams(leader, involved)
        if len(flat) == len(terms):
            alone(totals, flat, device=leader)
        else:
            together(totals, terms, device=leader)
        fork_streams(leader, involved)


def _allocate_sums(fresh: Sequence[_Addition]) -> None:
    """Allocates new sums back to back in flat buffers, which a take need not pack."""
    if len(fresh) == 1 and not fresh[0].state.over_mesh:  # no take packs it
        (one,) = fresh
        one.total = one.device.empty(one.gradients[0].shape, accumulate_dtype(one.state.dtype))
        return
    together: dict[tuple[Device, DType], list[_Addition]] = {}
    for addition in fresh:
        together.setdefault((addition.device, addition.state.dtype), []).append(addition)
    for (device, dtype), additions in together.items():
        shapes = [each.gradients[0].shape for each in additions]
        for addition, total in zip(
            additions, allocate_flat(device.empty, dtype, shapes), strict=True
        ):
            addition.total = total


def allocate_flat(
    make: Callable[[tuple[int, ...], DType], Buffer],
    dtype: DType,
    shapes: Sequence[tuple[int, ...]],
) -> list[Buffer]:
    """Allocates partial sums back to back in one flat buffer, which can be reduced unpacked.

    Args:
        make: ``empty`` or ``zeros`` of the device.
        dtype: of the accumulators.
        shapes: of the sums.
    """
    layout = flat_layout([math.prod(shape) for shape in shapes], dtype.itemsize)
    flat = make((layout.size,), accumulate_dtype(dtype))
    return [flat.view(offset, shape) for offset, shape in zip(layout.offsets, shapes, strict=True)]
