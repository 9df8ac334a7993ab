"""Partial sums of sparse gradients: adds rows, and merges and divides them at a take.

A sum holds a row for each index that any gradient touched, in order of arrival
(``ops/row_index.py``). One launch adds to existing rows and appends new ones. When the memory is
full, the rows are copied into twice as much. At a take, one launch sorts the rows of a sum by index
and divides each by the number of gradients that touched its index, or by that of all gradients.
Over a mesh, the rows of all devices are first copied to the first device, in mesh order, and the
result is copied once to each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gradreduce import checkpoint, ops
from gradreduce.arrays.convert import is_array, shape_and_dtype
from gradreduce.arrays.distributed import Part
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices, coalesce_n
from gradreduce.comm.replicas import Replicas, abort_others_on_error
from gradreduce.device import (
    Buffer,
    Device,
    DType,
    accumulate_dtype,
    as_dtype,
    by_physical,
    compatible,
    ensure_accessible,
)
from gradreduce.errors import InvalidArgumentError
from gradreduce.ops import (
    Divisor,
    Indices,
    RowIndex,
    concatenate_indices,
    merge_row_index,
    plan_segments,
)
from gradreduce.reduce.one_device import copy_to_each
from gradreduce.reduce.process_values import slices_of_all
from gradreduce.sums.slices import concatenate_rows
from gradreduce.weights import from_units

from .state import AccumulatorState, Addend, Addition, Storage, launch_all
from .validate import check_dtype, to_sum_device


@dataclass(frozen=True, eq=False)
class SparseSum:
    """The partial sum of sparse gradients on one device.

    Attributes:
        slots: the index of each row, and how many gradients touched it.
        values: ``(capacity, …)``, in the accumulate dtype. Rows from ``slots.num_rows`` on are
            uninitialized.
    """

    slots: RowIndex
    values: Buffer

    @property
    def arrays(self) -> tuple[Buffer, ...]:
        """The arrays that hold the rows."""
        return (self.values,)

    @property
    def rows(self) -> Buffer:
        """The rows of ``values`` that are in use."""
        return rows_in_use(self)[0]


def rows_in_use(total: Any) -> list[Buffer]:
    """Returns the rows that are in use of each array of a partial sum."""
    num_rows = total.slots.num_rows
    return [each.view(0, (num_rows, *each.shape[1:])) for each in total.arrays]


class SparseStorage(Storage):
    """Stores a row for each index that a gradient touched, in the accumulate dtype."""

    format = "gradreduce sparse accumulator 1"
    is_sparse = True

    def validate(self, state: AccumulatorState, grad: Any, cast: bool) -> IndexedSlices:
        """See ``Storage``. Gradients may have more dimensions than the accumulator's shape."""
        if not isinstance(grad, IndexedSlices):
            raise TypeError(
                f"a SparseConditionalAccumulator expects IndexedSlices, got {type(grad).__name__}"
            )
        check_dtype(state, grad.dtype, cast)
        if state.shape:
            _check_shape(state.shape, grad)
        return grad

    def to_addend(self, state: AccumulatorState, grad: IndexedSlices) -> Addend:
        """See ``Storage``. The first extent is the accumulator's, if known."""
        index, rows = to_sum_device(state, grad.values)
        first = UNKNOWN if grad.dense_shape is None else grad.dense_shape[0]
        if state.shape and state.shape[0] is not None:
            first = state.shape[0]
        return Addend(index, rows, (first, *rows.shape[1:]), plan_segments(grad.indices))

    def check_sum_shape(self, gradient: Addend, sum_shape: tuple[int, ...]) -> None:
        """See ``Storage``. Also checks the indices."""
        shape, indices = gradient.shape, gradient.segments.indices  # unique and ascending
        known = (None if UNKNOWN in (shape[0], sum_shape[0]) else sum_shape[0], *sum_shape[1:])
        if not compatible(shape, known):
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(sum_shape)}, got {list(shape)}"
            )
        if sum_shape[0] != UNKNOWN and len(indices) and indices[-1] >= sum_shape[0]:
            raise InvalidArgumentError(
                f"index {indices[-1]} is not below dense_shape[0] = {sum_shape[0]} of the first "
                "gradient in the sum"
            )

    def allocate(self, additions: Sequence[Addition]) -> None:
        """See ``Storage``. Copies the rows of sums that outgrow their memory."""
        moves: list[tuple[Buffer, Buffer]] = []  # destination and source
        for addition in additions:
            # A gradient without rows launches nothing, so no launch would check the device.
            addition.device.mesh_state.check_usable(addition.device)
            before, capacity, slots, steps = addition.total, 0, RowIndex.none(), []
            if before is not None:
                capacity, slots = before.arrays[0].shape[0], before.slots
            for part in addition.gradients:
                counts_weights = part.weight != 1 and addition.owner.sparse_mean == "per_row"
                slots, into = slots.add_gradient(
                    part.segments.indices, part.weight if counts_weights else 1
                )
                values = ensure_accessible(addition.device, part.values)
                term = self._scaled(addition, values, part.weight)
                steps.append((values, part.segments, into, term))
            addition.steps = steps
            addition.in_place = before is not None and slots.num_rows <= capacity
            if addition.in_place:
                addition.total = replace(before, slots=slots)
                continue
            capacity = max(slots.num_rows, 2 * capacity)
            shape = addition.owner.shape
            if shape and shape[0] is not None:
                capacity = min(capacity, shape[0])
            row_shape = addition.gradients[0].shape[1:]
            addition.total = self._new_sum(addition, slots, (capacity, *row_shape))
            if before is not None and before.slots.num_rows:
                sources = rows_in_use(before)
                outs = [each.view(0, sources[0].shape) for each in addition.total.arrays]
                moves += zip(outs, sources, strict=True)
        for indices in by_physical([out.device for out, _ in moves]).values():
            to, of = zip(*[moves[index] for index in indices], strict=True)
            ops.pack(to, of, device=to[0].device)

    def _scaled(self, addition: Addition, values: Buffer, weight: float) -> tuple[Buffer, float]:
        """Returns memory for the rows of a gradient times its weight, and the weight."""
        if weight == 1 or not values.size:
            return values, 1.0
        dtype = accumulate_dtype(addition.owner.dtype)
        return addition.device.empty(values.shape, dtype), weight

    def _new_sum(self, addition: Addition, slots: RowIndex, shape: tuple[int, ...]) -> Any:
        """Returns a partial sum with memory for the rows of ``shape``."""
        values = addition.device.empty(shape, accumulate_dtype(addition.owner.dtype))
        return SparseSum(slots, values)

    def command(self, steps: Sequence[tuple[Addition, Any]]) -> Callable[[], None]:
        """See ``Storage``."""
        totals = [each.total.values for each, _ in steps]
        rows, segments, into, scaled = zip(*[step for _, step in steps], strict=True)
        device = totals[0].device
        scales = [
            partial(ops.scale, [out], [values], weight, device=device)
            for values, (out, weight) in zip(rows, scaled, strict=True)
            if weight != 1
        ]
        terms = [out for out, _ in scaled]
        add = ops.segment_sum_command(totals, terms, segments, into=into, device=device)
        return partial(launch_all, [*scales, add]) if scales else add

    def take(
        self, states: Sequence[AccumulatorState], guard: ExitStack
    ) -> dict[AccumulatorState, tuple[Part, ...]]:
        """See ``Storage``. The sums are unchanged."""
        first = states[0]  # others wait only for those over a mesh, of a SyncStep
        with abort_others_on_error(first.devices[0]) if first.over_mesh else nullcontext():
            return {
                state: copy_to_each(self._merged(state), state.devices, keep=True)
                for state in states
            }

    def _merged(self, state: AccumulatorState) -> IndexedSlices:
        """Merges and divides the rows of all devices on the first one, in new memory."""
        totals, home = [total for total in state.totals if total is not None], state.devices[0]
        per_gradient = state.sparse_mean == "per_gradient"
        divisor: Divisor = 1.0
        replicas = Replicas(state.devices)
        # That of a SyncStep, to which each replica adds equally many gradients.
        if state.over_mesh and replicas.group.size > 1:
            sums = [
                IndexedSlices.of(each.rows, each.slots.by_row(), state.sum_shape) for each in totals
            ]
            parts = slices_of_all(home, sums, mean=True, coalesce=True, names=[state.tensor])
            plan = plan_segments(concatenate_indices([each.indices for each in parts]))
            rows = concatenate_rows(home, [each.values for each in parts])
        else:
            plan, divisor = merge_row_index(
                [total.slots for total in totals],
                mean=state.reduction_type == "MEAN" and not per_gradient,
            )
            rows = totals[0].rows
            if len(totals) > 1 or rows.device is not home:
                rows = concatenate_rows(home, [total.rows for total in totals])
        if per_gradient:
            divisor = from_units(state.weight())
        out = home.empty((plan.num_segments, *rows.shape[1:]), state.dtype)
        coalesce_n([rows], [plan], outs=[out], divisors=[divisor])
        return IndexedSlices.of(out, plan.indices, state.sum_shape)

    def fits(self, shape: tuple[int, ...], required: tuple[int | None, ...] | None) -> bool:
        """See ``Storage``. The first extent may be unknown; there may be more dimensions."""
        required = required or (None,)
        return UNKNOWN not in shape[1:] and compatible(shape[: len(required)], required)

    def save(self, total: Any) -> dict[str, Any]:
        """See ``Storage``. Returns a dict of arrays, in the order of the indices."""
        slots, copies = total.slots, list(map(checkpoint.queue_copy, rows_in_use(total)))
        saved = {
            "indices": slots.indices.copy(),
            "num_touches": slots.num_touches(),
            "values": lambda download: self._to_save(list(map(download, copies)), slots.rows),
        }
        if slots.excesses is not None:
            saved["weights"] = slots.weights_to_save()
        return saved

    def load(
        self, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> Callable[[Device], SparseSum]:
        """See ``Storage``. The new memory has no spare capacity."""
        rows = saved.get("indices") if isinstance(saved, Mapping) else None
        extents = checkpoint.shape_of(f"{name}['indices']", rows) if is_array(rows) else ()
        num_rows = extents[0] if extents else 0
        vector = checkpoint.array((num_rows,), as_dtype("int64"))
        schema = {
            "indices": vector,
            "num_touches": vector,
            "values": checkpoint.array(self._saved_shape(num_rows, *shape[1:]), dtype),
        }
        if isinstance(saved, Mapping) and "weights" in saved:
            saved_weights = saved["weights"]
            shape_of = checkpoint.shape_of if is_array(saved_weights) else lambda *_: ()
            width = shape_of(f"{name}['weights']", saved_weights)[1:2] or (1,)
            schema["weights"] = checkpoint.array((num_rows, *width), as_dtype("float64"))
        arrays = checkpoint.validate_state(name, saved, schema)
        indices, touches = arrays["indices"].copy(), arrays["num_touches"].copy()
        if not (indices[1:] > indices[:-1]).all():
            raise ValueError(f"{name}['indices'] must be strictly ascending, got {indices}")
        limit = 2**63 - 1 if shape[0] == UNKNOWN else shape[0] - 1
        checks = ("indices", indices, 0, limit), ("num_touches", touches, 1, count)
        for key, numbers, least, most in checks if num_rows else ():
            if not least <= numbers.min() <= numbers.max() <= most:
                raise ValueError(f"{name}[{key!r}] must be from {least} to {most}, got {numbers}")
        weights = arrays.get("weights")
        if weights is not None and num_rows and not (weights.sum(axis=1) > 0).all():
            raise ValueError(f"{name}['weights'] must have sums above 0, got {weights}")
        if weights is not None and num_rows and not abs(weights).max() < math.inf:
            raise ValueError(f"{name}['weights'] must be finite, got {weights}")
        slots = RowIndex.of(indices, touches, weights)
        return lambda device: self._upload(device, slots, arrays["values"])

    def _to_save(self, arrays: Sequence[Any], rows: Indices) -> Any:
        """Returns the rows of arrays on the host that a checkpoint has, in this order."""
        return arrays[0][rows]

    def _saved_shape(self, num_rows: int, *row_shape: int) -> tuple[int, ...]:
        """Returns the shape of an array from ``_to_save``."""
        return num_rows, *row_shape

    def _upload(self, device: Device, slots: RowIndex, saved: Any) -> Any:
        """Returns a partial sum with the rows of an array from ``_to_save``."""
        return SparseSum(slots, device.upload(saved))


SPARSE = SparseStorage()


def _check_shape(required: tuple[int | None, ...], slices: IndexedSlices) -> None:
    """Checks that slices fit the accumulator's shape, which may have fewer dimensions."""
    if slices.dense_shape is not None:
        first, *row = slices.dense_shape
        _check_extents("shape", required, (None if first == UNKNOWN else first, *row))
    last = int(slices.indices.max(initial=-1))
    if required[0] is not None and last >= required[0]:
        raise InvalidArgumentError(
            f"index of slice {int(slices.indices.argmax())} exceeded limits of shape; index is "
            f"{last} exceeded {required[0]}"
        )
    rows, _ = shape_and_dtype(slices.values)
    _check_extents("values", required, (None, *rows[1:]))


def _check_extents(
    what: str, required: tuple[int | None, ...], shape: tuple[int | None, ...]
) -> None:
    """Raises ``InvalidArgumentError`` if known extents differ or dimensions are missing."""
    if len(shape) < len(required):
        raise InvalidArgumentError(
            f"expected {what} rank at least {len(required)}, got {len(shape)}"
        )
    for index, (extent, known) in enumerate(zip(shape, required, strict=False)):
        if extent is not None and known is not None and extent != known:
            raise InvalidArgumentError(f"expected {what} dim {index} to be {known}, got {extent}")
