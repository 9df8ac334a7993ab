"""Derivative rules of indexing: slices, rows, integer arrays and masks.

Gradients of elements that were read twice are added. Positions are computed on the host, and
``ops.segment_sum_command`` adds the elements in the order in which they were read: deterministic
for NumPy and CuPy arrays, which have no ``np.add.at``. The gradient of rows gathered from a
Variable is ``IndexedSlices``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradreduce.arrays.convert import host_array
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.trace_context import Traceable, traceable
from gradreduce.errors import InvalidArgumentError

from .array_methods import index_into
from .registry import COMPOSED, RULES, VIEWS, VJP, Maker
from .rules_broadcast import normalized, shape_of
from .unsupported import no_rule

_BASIC = (int, np.integer, slice, type(None), type(Ellipsis))
Shape = tuple[int, ...]


@traceable
def embedding_lookup(params: Any, ids: Any) -> Any:
    """Returns the rows ``ids`` of ``params`` (tf.nn.embedding_lookup).

    The gradient of a Variable that is only looked up is ``IndexedSlices``: a row for each id, in
    order, also for duplicate ids.

    Args:
        params: a Variable, or an array ``(rows, …)``.
        ids: integers from 0 up, in any shape. Those on a GPU are copied to the host, which waits.

    Returns:
        An array of shape ``(*ids.shape, *params.shape[1:])``.

    Raises:
        TypeError: ``params`` has no rows, or ``ids`` are not integers.
        InvalidArgumentError: (a ``ValueError``) an id is negative or not below the number of rows.
    """
    if not getattr(params, "shape", ()):
        kind = type(params).__name__
        raise TypeError(f"params must be a Variable or an array (rows, …), got {kind}")
    rows = np.asarray(_on_host(ids))
    if rows.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {rows.dtype}")
    num_rows = params.shape[0]
    if rows.size and not (rows.min() >= 0 and rows.max() < num_rows):
        raise InvalidArgumentError(
            f"ids are from {rows.min()} to {rows.max()}; allowed are 0 to {num_rows - 1}"
        )
    return params[rows]


@traceable
def rows_added(values: Any, rows: Any, shape: Shape) -> Any:
    """Adds ``values[k]`` to row ``rows[k]`` of zeros of ``shape``."""
    return _added_by_segments(values, rows, shape)


def _added_by_segments(values: Any, rows: Any, shape: Shape) -> Any:
    return IndexedSlices(values, rows, shape).to_dense()


@traceable
def put_back(values: Any, index: Any, shape: Shape) -> Any:
    """Writes ``values`` to a basic index of zeros of ``shape``."""
    whole = np.zeros_like(values, shape=shape)
    whole[index] = values
    return whole


def _taken_back(out: Any, values: Any, index: Any, shape: Shape) -> tuple[Maker]:
    return (lambda: lambda g: g[index],)


def _scattered(g: Any, flat: Any, shape: Shape) -> Any:
    """Adds the elements of ``g`` at the flat positions of zeros of ``shape``."""
    size = math.prod(shape)
    return np.reshape(rows_added(np.reshape(g, (-1,)), flat, (size,)), shape)


def _is_basic(index: Any) -> bool:
    within = index if isinstance(index, tuple) else (index,)
    return all(isinstance(each, _BASIC) for each in within)


def _on_host(index: Any) -> Any:
    """Converts the arrays of an index to NumPy."""
    if isinstance(index, tuple):
        return tuple(_on_host(each) for each in index)
    if isinstance(index, _BASIC):
        return index
    indices = np.asarray(host_array([*index] if isinstance(index, range) else index))
    return indices if indices.size or indices.dtype == bool else indices.astype(np.int64)


def _index_into(out: Any, x: Any, index: Any) -> tuple[Maker]:
    shape = shape_of(x)
    if _is_basic(index):
        return (lambda: lambda g: put_back(g, index, shape),)

    def vjp(g: Any) -> Any:
        indices = np.arange(math.prod(shape)).reshape(shape)[_on_host(index)]
        return _scattered(g, indices.ravel(), shape)

    return (lambda: vjp,)


def _gathered(shape: Shape, rows: Any) -> VJP:
    """The VJP of gathering rows: IndexedSlices, unless the gradient is traced."""

    def vjp(g: Any) -> Any:
        if isinstance(g, Traceable):
            size = math.prod(shape[1:])
            flat = rows.reshape(-1, 1) * size + np.arange(size)
            return _scattered(g, flat.ravel(), shape)
        return _rows(np.reshape(g, (rows.size, *shape[1:])), rows.ravel(), shape)

    return vjp


def _rows(values: Any, rows: Any, shape: Shape) -> Any:
    return IndexedSlices(values, rows, shape)


def _embedding_lookup(out: Any, params: Any, ids: Any) -> tuple[Maker]:
    shape = shape_of(params)
    return (lambda: _gathered(shape, np.asarray(_on_host(ids))),)


def _take(
    out: Any, a: Any, indices: Any, axis: Any = None, _out: Any = None, mode: str = "raise"
) -> tuple[Maker]:
    """The rule of ``np.take``; along the first axis it gathers rows."""
    shape = shape_of(a)
    flat = axis is None
    along = 0 if flat else normalized(axis, len(shape))
    extent = math.prod(shape) if flat else shape[along]

    def make() -> VJP:
        positions = _on_host(indices)
        positions = np.asarray(positions)
        positions = np.clip(positions, 0, extent - 1) if mode == "clip" else positions % extent
        if along == 0 and not flat:
            return _gathered(shape, positions)
        if flat:
            return lambda g: _scattered(g, positions.ravel(), shape)
        index = (slice(None),) * along + (positions,)
        return lambda g: _scattered(
            g, np.arange(math.prod(shape)).reshape(shape)[index].ravel(), shape
        )

    return (make,)


def _take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    if axis is None:
        raise no_rule("np.take_along_axis(..., axis=None)")
    along = normalized(axis, arr.ndim)
    positions = np.asarray(host_array(indices))
    if positions.ndim != arr.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    if positions.dtype.kind not in "iu":
        raise IndexError("`indices` must be an integer array")
    grid = list(np.ogrid[tuple(slice(extent) for extent in arr.shape)])  # either is broadcast
    grid[along] = positions
    return arr[tuple(grid)]


RULES[index_into] = _index_into
RULES[put_back] = RULES[rows_added] = _taken_back
RULES[embedding_lookup] = _embedding_lookup
RULES[np.take] = _take
COMPOSED[np.take_along_axis] = _take_along_axis
VIEWS.add(index_into)
