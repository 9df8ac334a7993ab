"""Partial sums of dense gradients: adds gradients with one launch for each GPU.

The first gradient after a take is copied with a cast into new memory, later ones are added in
place: nothing is zeroed, and the host does not wait for a device. A take all-reduces the sums of a
mesh, and divides those of one device, in place where it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, zip_longest
from operator import attrgetter
from typing import Any

from gradreduce import ops
from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import is_array, kind_of, numbers, shape_and_dtype
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices, densified
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
from gradreduce.errors import InvalidArgumentError
from gradreduce.reduce.aggregation import known_shape
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.reduce.one_device import by_gpu

from .state import AccumulatorState, Addend, Additions, PendingGradient, Storage
from .validate import check_dtype, to_sum_device

_Kernel = Callable[..., None]
# Mesh accumulators that are reduced together: devices, divisor, cross_device_ops.
_Batch = tuple[tuple[Device, ...], float, CrossDeviceOps]
_Division = tuple[float, Buffer, Buffer]  # divisor, sum, output


@dataclass(slots=True)
class _Addition:
    """Gradients to add to one partial sum.

    Attributes:
        state: the accumulator.
        device_index: index of the device in ``state.devices``.
        device: that device.
        runs: gradients that are accessible to the device, in the order of addition; one launch
            adds those of a run.
        total: the partial sum; a new one is uninitialized until its first launch.
    """

    state: AccumulatorState
    device_index: int
    device: Device
    runs: list[list[Buffer]]
    total: Any


# A partial sum, and the gradients that one launch adds to it.
_Row = tuple[_Addition, list[Buffer]]


class DenseStorage(Storage):
    """Stores each partial sum as one array, in the accumulate dtype."""

    sparse = False
    format = "gradreduce dense accumulator 1"

    def prepare(self, state: AccumulatorState) -> None:
        """See ``Storage``."""
        acc_dtype = accumulate_dtype(state.dtype)
        for device in state.devices:
            ops.prepare_add_n(device, acc_dtype, state.dtype, 1)
            ops.prepare_accumulate_n(device, acc_dtype, state.dtype)
            ops.prepare_all_sum(device, state.dtype, acc_dtype)
        if state.over_mesh:
            state.cross_device_ops.compile_for(state.devices, acc_dtype, state.dtype)

    def checked(self, state: AccumulatorState, grad: Any, cast: bool) -> Any:
        """See ``Storage``; IndexedSlices without a shape get the accumulator's, if known."""
        wanted = state.shape
        if isinstance(grad, IndexedSlices):
            check_dtype(state, grad.dtype, cast)
            if grad.dense_shape is None and wanted and None not in wanted:
                grad = IndexedSlices(grad.values, grad.indices, [each or 0 for each in wanted])
            shape = known_shape(grad, alone=True)
        else:
            known = kind_of(grad) in ("native", "buffer")
            grad = grad if is_array(grad) else numbers(grad, state.dtype)
            shape, dtype = (grad.shape, grad.dtype) if known else shape_and_dtype(grad)
            check_dtype(state, dtype, cast)
        if wanted is not None and shape != wanted and not compatible(shape, wanted):
            raise ValueError(
                f"Shapes {shape} and {wanted} are incompatible: the gradient's and the "
                "accumulator's"
            )
        return grad

    def converted(self, state: AccumulatorState, grad: Any, cast: bool) -> Addend:
        """See ``Storage``; makes IndexedSlices dense."""
        if not isinstance(grad, IndexedSlices) and kind_of(grad) not in ("native", "buffer"):
            index, buffer = to_sum_device(state, grad)  # whose dtype is known at less cost
            return index, self.checked(state, buffer, cast)
        checked = self.checked(state, grad, cast)
        if not isinstance(checked, IndexedSlices):
            return to_sum_device(state, checked)
        index, rows = to_sum_device(state, checked.values)
        (array,) = densified([IndexedSlices.of(rows, checked.indices, checked.dense_shape)])
        return index, array

    def prepare_parts(self, state: AccumulatorState, parts: Sequence[Addend]) -> None:
        """See ``Storage``."""
        together = len({index for index, _ in parts}) < len(parts)
        if together or any([part.dtype != state.dtype for _, part in parts]):
            acc_dtype = accumulate_dtype(state.dtype)
            for index, gradients in _by_device(parts).items():
                device, first = state.devices[index], _runs(gradients, acc_dtype)[0]
                ops.prepare_add_n(device, acc_dtype, first[0].dtype, len(first))
                for dtype in dict.fromkeys([gradient.dtype for gradient in gradients]):
                    ops.prepare_accumulate_n(device, acc_dtype, dtype)

    def check_sum_shape(self, gradient: Any, wanted: tuple[int, ...]) -> None:
        """See ``Storage``."""
        if gradient.shape != wanted:
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(wanted)}, got {list(gradient.shape)}"
            )

    def additions(self, pending_gradients: Sequence[PendingGradient]) -> Additions:
        """See ``Storage``.

        First gradients are copied, later ones added; devices on one GPU share launches. Several
        gradients for one sum are added in order, with the same bits as one call for each: in one
        launch if they have one dtype and the sum its accumulate dtype, else one after the other.
        """
        fresh: list[_Addition] = []
        later: list[_Addition] = []
        for state, parts, _ in pending_gradients:
            for index, gradients in _by_device(parts).items():
                device, total = state.devices[index], state.totals[index]
                gradients = [to_accessible(device, gradient) for gradient in gradients]
                runs = _runs(gradients, accumulate_dtype(state.dtype) if total is None else None)
                addition = _Addition(state, index, device, runs, total)
                (fresh if total is None else later).append(addition)
        if fresh:
            _allocate_sums(fresh)
        first = [(each, each.runs.pop(0)) for each in fresh]
        sums = fresh + later
        waves = zip_longest(*[[(each, run) for run in each.runs] for each in sums])
        return Additions(
            [partial(_add, ops.add_n, first)] if first else [],
            [partial(_add, ops.accumulate_n, [row for row in wave if row]) for wave in waves],
            [each.device for each in later],
            [(each.state, each.device_index, each.total) for each in sums],
        )

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``; sums may be reduced or divided in place."""
        taken: dict[AccumulatorState, tuple[Part, ...]] = {}
        batches: dict[_Batch, list[AccumulatorState]] = {}
        apart: list[_Division] = []
        in_place: list[_Division] = []
        for state in states:
            divisor = float(state.count if state.reduction_type == "MEAN" else 1)
            if state.over_mesh:
                key = (state.devices, divisor, state.cross_device_ops)
                batches.setdefault(key, []).append(state)
                continue
            (out,) = (total,) = state.totals
            if total.dtype != state.dtype:
                out = total.device.empty(total.shape, state.dtype)
                apart.append((divisor, total, out))
            elif divisor != 1:
                in_place.append((divisor, total, out))
            taken[state] = (out,)
        alone = bool(taken)
        for index, ((_, divisor, reducer), together) in enumerate(batches.items(), 1):
            # A batch allocates its memory before its first launch; but a later batch may fail to,
            # and then the sums of those before it must be intact. So only the last one may
            # overwrite its sums, and only if no division follows.
            last = index == len(batches) and not alone
            reduced = reducer.reduce_buffers(
                _partials(together),
                divisor=divisor,
                out_dtypes=[state.dtype for state in together],
                consume=guard if last else None,
                names=_names_of(together),
            )
            taken.update(zip(together, reduced, strict=True))
        _divide(apart)
        if in_place:
            kept = [total.device for _, total, _ in in_place]
            guard.enter_context(kept[0].mesh_state.fail_on_partial_write(kept))
            _divide(in_place)
        return taken

    def fits(self, shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
        """See ``Storage``."""
        return UNKNOWN not in shape and (wanted is None or compatible(shape, wanted))

    def save(self, total: Any) -> Callable[[float | None], Any]:
        """See ``Storage``; an array."""
        return partial(snapshots.downloaded, snapshots.copied(total))

    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Buffer]:
        """See ``Storage``."""
        host = snapshots.checked_array(name, saved, shape, accumulate_dtype(dtype))
        return lambda device: device.upload(host)


DENSE = DenseStorage()


def _names_of(states: Sequence[AccumulatorState]) -> list[str]:
    """Returns the names of tensors; empty where several accumulators have the default name."""
    names = [state.tensor or state.name for state in states]
    is_each_named = len({*names}) == len(names) or all([state.tensor for state in states])
    return names if is_each_named else []


def _by_device(parts: Sequence[Addend]) -> dict[int, list[Buffer]]:
    """The gradients for each partial sum, in the order of the replicas."""
    found: dict[int, list[Buffer]] = {}
    for index, gradient in parts:
        assert isinstance(gradient, Buffer)
        found.setdefault(index, []).append(gradient)
    return found


def _runs(gradients: list[Buffer], acc_dtype: DType | None) -> list[list[Buffer]]:
    """Splits the gradients of a sum into runs of one dtype, each for one launch.

    ``add_n`` starts a new sum, of dtype ``acc_dtype``, and accumulates in the accumulate dtype of
    its inputs; if the sum has another dtype, the first gradient is cast alone.
    """
    if len(gradients) == 1:
        return [gradients]
    if acc_dtype is not None and accumulate_dtype(gradients[0].dtype) != acc_dtype:
        return [gradients[:1], *_runs(gradients[1:], None)]
    return [list(run) for _, run in groupby(gradients, attrgetter("dtype"))]


def _add(kernel: _Kernel, rows: Sequence[_Row]) -> None:
    """Adds with one launch for each GPU, dtype and number of gradients.

    Args:
        kernel: adds a list of gradients to each sum.
        rows: the sums and their gradients, checked before.
    """
    for indices in by_physical([addition.device for addition, _ in rows]).values():
        totals: list[Buffer] = []
        terms: list[list[Buffer]] = []
        for index in indices:
            addition, gradients = rows[index]
            totals.append(addition.total)
            terms.append(gradients)
        leader = totals[0].device
        involved = [buffer.device for buffer in (*totals, *chain.from_iterable(terms))]
        join_streams(leader, involved)
        kernel(totals, terms, device=leader, checked=False)
        fork_streams(leader, involved)


def _allocate_sums(fresh: Sequence[_Addition]) -> None:
    """Allocates new sums; those that a take may pack, so that it need not."""
    if len(fresh) == 1 and not fresh[0].state.over_mesh:
        (one,) = fresh
        one.total = one.device.empty(one.runs[0][0].shape, accumulate_dtype(one.state.dtype))
        return
    sums = [(each.device, each.state.dtype, each.runs[0][0].shape) for each in fresh]
    for each, total in zip(fresh, _allocate_flat(sums), strict=True):
        each.total = total


def _allocate_flat(
    sums: Sequence[tuple[Device, DType, tuple[int, ...]]], *, zeros: bool = False
) -> list[Buffer]:
    """Allocates the partial sums of each device and dtype back to back in one flat buffer.

    Args:
        sums: of each its device, the dtype of its accumulator, and its shape.
        zeros: fill them with zeros.
    """
    made: dict[int, Buffer] = {}
    groups: dict[tuple[Device, DType], list[int]] = {}
    for index, (device, dtype, _) in enumerate(sums):
        groups.setdefault((device, dtype), []).append(index)
    for (device, dtype), indices in groups.items():
        layout = flat_layout([math.prod(sums[index][2]) for index in indices], dtype.itemsize)
        flat = (device.zeros if zeros else device.empty)((layout.size,), accumulate_dtype(dtype))
        for index, offset in zip(indices, layout.offsets, strict=True):
            made[index] = flat.view(offset, sums[index][2])
    return [made[index] for index in range(len(sums))]


def _partials(states: Sequence[AccumulatorState]) -> list[list[Buffer]]:
    """The partial sums of each state; zeros for a device without gradients.

    The zeros of a device are allocated like sums that were added together: so the packing does not
    depend on which devices have gradients.
    """
    missing = [
        (state, index)
        for state in states
        for index, total in enumerate(state.totals)
        if total is None
    ]
    sums = [(state.devices[index], state.dtype, state.sum_shape or ()) for state, index in missing]
    zeros = dict(zip(missing, _allocate_flat(sums, zeros=True), strict=True))
    return [
        [zeros.get((state, index), total) for index, total in enumerate(state.totals)]
        for state in states
    ]


def _divide(divisions: Sequence[_Division]) -> None:
    """Divides sums with one launch for each GPU, divisor and dtype."""
    by_divisor: dict[float, list[_Division]] = {}
    for division in divisions:
        by_divisor.setdefault(division[0], []).append(division)
    for divisor, sharing in by_divisor.items():
        for indices, leader in by_gpu([total for _, total, _ in sharing]):
            outs = [[sharing[index][2]] for index in indices]
            totals = [[sharing[index][1]] for index in indices]
            ops.all_sum(outs, totals, divisor=divisor, device=leader)
