"""Partial sums of dense gradients: adds gradients with one launch for each GPU.

The first gradient after a take is copied into new memory, in the accumulate dtype. Later gradients
are added in place. No memory is zeroed, and the host does not wait for a device. A take all-reduces
the sums of a mesh, and divides the sums of one device, in place if the result has the same dtype.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from gradreduce import checkpoint, ops
from gradreduce.arrays.convert import PLAIN, is_array, kind_of, numbers, shape_and_dtype
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices, to_dense_n
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    by_physical,
    compatible,
    ensure_accessible,
    flat_layout,
)
from gradreduce.errors import InvalidArgumentError
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.sums.slices import require_shape
from gradreduce.weights import from_units

from .state import AccumulatorState, Addend, Addition, Storage, launch_all
from .validate import check_dtype, to_sum_device

SumForm = tuple[Device, DType, tuple[int, ...]]  # device, dtype of the accumulator, shape
_Divisions = dict[float, list[tuple[Buffer, Buffer]]]  # divisor -> sums and outputs


class DenseStorage(Storage):
    """Stores each partial sum as one array, in the accumulate dtype."""

    format = "gradreduce dense accumulator 1"
    overwrites = True
    is_sparse = False

    def validate(self, state: AccumulatorState, grad: Any, cast: bool) -> Any:
        """See ``Storage``. IndexedSlices without a shape get the accumulator's, if known."""
        required = state.shape
        if isinstance(grad, IndexedSlices):
            check_dtype(state, grad.dtype, cast)
            if grad.dense_shape is None and required and None not in required:
                grad = IndexedSlices(grad.values, grad.indices, [each or 0 for each in required])
            shape = require_shape(grad, alone=True)
        else:
            is_plain = type(grad) in PLAIN
            known = is_plain or kind_of(grad) in ("native", "buffer")
            grad = grad if is_plain or is_array(grad) else numbers(grad, state.dtype)
            shape, dtype = (grad.shape, grad.dtype) if known else shape_and_dtype(grad)
            check_dtype(state, dtype, cast)
        if required is not None and shape != required and not compatible(shape, required):
            raise ValueError(
                f"Shapes {shape} and {required} are incompatible: the gradient has the first, the "
                "accumulator the second"
            )
        return grad

    def to_addend(self, state: AccumulatorState, grad: Any) -> Addend:
        """See ``Storage``. Converts IndexedSlices to dense arrays."""
        if not isinstance(grad, IndexedSlices):
            index, array = to_sum_device(state, grad)
        else:
            index, rows = to_sum_device(state, grad.values)
            (array,) = to_dense_n([IndexedSlices.of(rows, grad.indices, grad.dense_shape)])
        return Addend(index, array, array.shape)

    def check_sum_shape(self, gradient: Addend, sum_shape: tuple[int, ...]) -> None:
        """See ``Storage``."""
        if gradient.shape != sum_shape:
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(sum_shape)}, got {list(gradient.shape)}"
            )

    def allocate(self, additions: Sequence[Addition]) -> None:
        """See ``Storage``. The first gradient of a sum is copied, later ones are added.

        Several gradients for one sum are added in order, in one launch if they have the same dtype.
        The result has the same bits as if each gradient was added by its own call. New sums of one
        device and dtype are allocated back to back, so that a take need not pack them.
        """
        fresh = []
        for addition, gradients in zip(additions, accessible_gradients(additions), strict=True):
            addition.in_place = addition.total is not None
            if not addition.in_place:
                fresh.append(addition)
            first = [] if addition.in_place else [[gradients.pop(0)]]
            addition.steps = first + steps_of(gradients)
        if len(fresh) == 1 and not fresh[0].owner.over_mesh:
            (one,) = fresh
            one.total = one.device.allocate(
                one.gradients[0].shape, accumulate_dtype(one.owner.dtype)
            )
        elif fresh:
            sums = [
                (addition.device, addition.owner.dtype, addition.gradients[0].shape)
                for addition in fresh
            ]
            for addition, total in zip(fresh, allocate_flat(sums), strict=True):
                addition.total = total

    def command(self, steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
        """See ``Storage``."""
        first, of_first = steps[0]
        is_copy = not first.in_place and of_first is first.steps[0]
        rows: dict[float, tuple[list[Buffer], list[list[Buffer]]]] = {}
        for addition, step in steps:
            totals, terms = rows.setdefault(step[0][1], ([], []))
            totals.append(addition.total)
            terms.append([buffer for buffer, _ in step])
        launches = []
        for weight, (totals, terms) in rows.items():
            if weight == 1:
                add = ops.add_n if is_copy else ops.accumulate_n
                launches.append(partial(add, totals, terms, device=first.device))
            else:
                scale = ops.scale if is_copy else ops.add_scaled
                alone = [term for (term,) in terms]
                launches.append(partial(scale, totals, alone, weight, device=first.device))
        return launches[0] if len(launches) == 1 else partial(launch_all, launches)

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``. Sums may be reduced or divided in place."""
        taken: dict[AccumulatorState, tuple[Part, ...]] = {}
        # Those over meshes that are reduced together, by devices, divisor and cross_device_ops.
        batches: dict[tuple[Any, int, CrossDeviceOps, int], list[AccumulatorState]] = {}
        apart: _Divisions = defaultdict(list)
        in_place: _Divisions = defaultdict(list)
        for state in states:
            mean = state.reduction_type == "MEAN"
            if state.over_mesh:
                of_mean = (state.count, state.excess) if mean else (1, 0)
                key = (state.devices, of_mean[0], state.cross_device_ops, of_mean[1])
                batches.setdefault(key, []).append(state)
                continue
            divisor = from_units(state.weight()) if mean else 1.0
            (out,) = (total,) = state.totals
            if total.dtype != state.dtype:
                out = total.device.allocate(total.shape, state.dtype)
                apart[divisor].append((total, out))
            elif divisor != 1:
                in_place[divisor].append((total, out))
            taken[state] = (out,)
        # A batch may overwrite its sums only if nothing is allocated after it: a later allocation
        # that fails must leave the sums of the batch intact.
        consume = guard if len(batches) == 1 and not taken else None
        for (_, count, reducer, excess), together in batches.items():
            reduced = reducer.reduce_buffers(
                self.partial_sums(together),
                divisor=float(count),
                weight=from_units(together[0].weight()) if excess else None,
                out_dtypes=[state.dtype for state in together],
                consume=consume,
                names=names_of(together),
            )
            taken.update(zip(together, reduced, strict=True))
        _divide(apart)
        if in_place:
            kept = [out.device for pairs in in_place.values() for _, out in pairs]
            guard.enter_context(kept[0].mesh_state.fail_on_partial_write(kept))
            _divide(in_place)
        return taken

    def partial_sums(self, states: Sequence[AccumulatorState]) -> list[list[Any]]:
        """Returns the partial sums of each state; zeros for a device without gradients.

        The zeros of a device are allocated back to back, like sums that were added together. So the
        packing does not depend on which devices have gradients.
        """
        missing = [
            (device, state.dtype, _shape_of_sum(state))
            for state in states
            for device, total in zip(state.devices, state.totals, strict=True)
            if total is None
        ]
        zeros = iter(self._zeros(missing)) if missing else iter(())
        return [
            [next(zeros) if total is None else total for total in state.totals] for state in states
        ]

    def _zeros(self, sums: Sequence[SumForm]) -> list[Any]:
        """Returns partial sums of nothing."""
        return allocate_flat(sums, zeros=True)

    def fits(self, shape: tuple[int, ...], required: tuple[int | None, ...] | None) -> bool:
        """See ``Storage``."""
        return UNKNOWN not in shape and (required is None or compatible(shape, required))

    def save(self, total: Any) -> Any:
        """See ``Storage``. Returns an array."""
        return checkpoint.queue_copy(total)

    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], Any]:
        """See ``Storage``."""
        host = checkpoint.array(shape, dtype)(name, saved)
        return lambda device: device.upload(host)


DENSE = DenseStorage()


def accessible_gradients(additions: Sequence[Addition]) -> list[list[tuple[Buffer, float]]]:
    """Returns the gradients of each addition, which its device can read, and their weights."""
    rows: list[list[tuple[Buffer, float]]] = []
    for addition in additions:  # loops: each comprehension would be a call
        rows.append(row := [])
        for part in addition.gradients:
            values = part.values
            if values.device is not addition.device:
                values = ensure_accessible(addition.device, values)
            row.append((values, part.weight))
    return rows


def steps_of(gradients: Sequence[tuple[Buffer, float]]) -> list[list[tuple[Buffer, float]]]:
    """Returns what each launch adds: neighbours of one dtype and weight 1, or one gradient."""
    steps: list[list[tuple[Buffer, float]]] = []
    for buffer, weight in gradients:
        if steps and steps[-1][0][1] == weight == 1 and steps[-1][0][0].dtype == buffer.dtype:
            steps[-1].append((buffer, weight))
        else:
            steps.append([(buffer, weight)])
    return steps


def names_of(states: Sequence[AccumulatorState]) -> list[str]:
    """Returns the names of the tensors; empty if they do not tell the accumulators apart."""
    names = [state.label for state in states]
    is_each_named = len({*names}) == len(names) or all([state.tensor for state in states])
    return names if is_each_named else []


def allocate_flat(sums: Sequence[SumForm], *, zeros: bool = False) -> list[Buffer]:
    """Allocates partial sums back to back, in one flat buffer for each device and dtype.

    Args:
        sums: the sums.
        zeros: fill the sums with zeros.
    """
    views: dict[int, Buffer] = {}
    groups: dict[tuple[Device, DType], list[int]] = {}
    for index, (device, dtype, _) in enumerate(sums):
        groups.setdefault((device, dtype), []).append(index)
    for (device, dtype), indices in groups.items():
        layout = flat_layout([math.prod(sums[index][2]) for index in indices], dtype.itemsize)
        flat = (device.zeros if zeros else device.empty)((layout.size,), accumulate_dtype(dtype))
        shapes = [sums[index][2] for index in indices]
        views.update(zip(indices, flat.parts(layout.offsets, layout.sizes, shapes), strict=True))
    return [views[index] for index in range(len(sums))]


def _shape_of_sum(state: AccumulatorState) -> tuple[int, ...]:
    """Returns the shape of a sum; no gradient of this process may have been read."""
    if state.sum_shape is not None:
        return state.sum_shape
    return tuple([extent or 0 for extent in state.shape or ()])


def _divide(divisions: _Divisions) -> None:
    """Divides sums with one launch for each GPU, divisor and dtype."""
    for divisor, pairs in divisions.items():
        for indices in by_physical([total.device for total, _ in pairs]).values():
            totals, outs = zip(*[pairs[index] for index in indices], strict=True)
            ops.all_sum([[out] for out in outs], [[total] for total in totals],
                        divisor=divisor, device=totals[0].device)  # fmt: skip
