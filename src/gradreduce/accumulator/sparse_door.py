"""What may enter a sparse accumulator: rows and their indices, checked before anything changes.

The words of the errors that TensorFlow has too are TensorFlow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.device import Buffer, compatible
from gradreduce.errors import InvalidArgumentError
from gradreduce.indexed_slices import UNKNOWN, IndexedSlices
from gradreduce.interop import shape_and_dtype, to_buffer
from gradreduce.ops import plan_segments
from gradreduce.values import PerReplica

from .door import check_dtype, home_of
from .sparse_sums import prepare_gradient
from .state import AccumulatorState, Arrival, SparseGradient

__all__ = ["check_sum_shape", "num_sparse_gradients", "sparse_arrival"]


def sparse_arrival(state: AccumulatorState, grad: Any, cast: bool) -> Arrival:
    """Checks and places one sparse gradient, or one for each replica.

    Raises:
        TypeError: neither IndexedSlices nor a ``PerReplica`` of them.
        ValueError: another dtype, without ``cast``.
        InvalidArgumentError: its shape does not fit the accumulator's, or an index leaves that.
    """
    parts = []
    for slices in _checked(state, grad, cast):
        place, rows = home_of(state, slices.values)
        parts.append((place, _gradient(state, slices, rows)))
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in parts):
        if dtype != state.dtype:  # cast: what that launches was not prepared before
            prepare_gradient(state, dtype)
    return Arrival(state, tuple(parts), grad.kind)


def num_sparse_gradients(state: AccumulatorState, grad: Any, cast: bool) -> int:
    """As ``num_gradients`` of the door: for what will be dropped."""
    given = _checked(state, grad, cast)
    for slices in given:
        if isinstance(slices.values, Buffer):
            to_buffer(slices.values, state.devices[0])  # of this mesh
    return len(given)


def _checked(state: AccumulatorState, grad: Any, cast: bool) -> list[IndexedSlices]:
    """One for each gradient, as they came."""
    given: Sequence[Any] = grad.parts if isinstance(grad, PerReplica) else [grad]
    for slices in given:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"a SparseConditionalAccumulator takes IndexedSlices, got {type(slices).__name__}"
            )
        check_dtype(state, slices.dtype, cast)
        _check_shape(state, slices)
    return list(given)


def _gradient(state: AccumulatorState, slices: IndexedSlices, rows: Buffer) -> SparseGradient:
    """The whole array's first extent is the accumulator's; else what came with the gradient."""
    first = slices.dense_shape[0] if slices.dense_shape is not None else UNKNOWN
    if state.shape and state.shape[0] is not None:
        first = state.shape[0]
    return SparseGradient(rows, plan_segments(slices.indices), (first, *rows.shape[1:]))


def _check_shape(state: AccumulatorState, slices: IndexedSlices) -> None:
    """Against the accumulator's shape, which may have fewer dimensions; () says nothing."""
    wanted = state.shape
    if not wanted:
        return
    given = slices.dense_shape
    if given is not None:
        _check_extents("shape", wanted, (None if given[0] == UNKNOWN else given[0], *given[1:]))
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
    what: str, wanted: tuple[int | None, ...], given: tuple[int | None, ...]
) -> None:
    """Raises ``InvalidArgumentError`` if known extents differ, or dimensions are missing."""
    if len(given) < len(wanted):
        raise InvalidArgumentError(f"expected {what} rank at least {len(wanted)}, got {len(given)}")
    for place, (extent, known) in enumerate(zip(given, wanted, strict=False)):
        if extent is not None and known is not None and extent != known:
            raise InvalidArgumentError(f"expected {what} dim {place} to be {known}, got {extent}")


def check_sum_shape(arrival: Arrival) -> None:
    """Against what the first gradient since the last take has fixed; the lock must be held.

    Raises:
        InvalidArgumentError: rows of another shape, another ``dense_shape``, or an index that
            leaves the one that is remembered.
    """
    state = arrival.state
    expected = arrival.shape if not state.count or state.sum_shape is None else state.sum_shape
    for _, gradient in arrival.parts:
        assert isinstance(gradient, SparseGradient)
        first, *row = gradient.dense_shape
        known = (None if UNKNOWN in (first, expected[0]) else expected[0], *expected[1:])
        if not compatible((first, *row), known):
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(expected)}, got {[first, *row]}"
            )
        indices = gradient.segments.indices  # every one once, rising: no places of the caller's
        if expected[0] != UNKNOWN and len(indices) and indices[-1] >= expected[0]:
            raise InvalidArgumentError(
                f"index {indices[-1]} is not below dense_shape[0] = {expected[0]}, which the first "
                "gradient in the sum came with"
            )
