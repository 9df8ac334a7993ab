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

from gradreduce.arrays.array_methods import index_into, traceable
from gradreduce.arrays.convert import host_array
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.errors import InvalidArgumentError

from .registry import COMPOSED, RULES, VJP
from .rules_broadcast import normalized, shape_of

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
    rows = _on_host(ids)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {rows.dtype}")
    num_rows = params.shape[0]
    if rows.size and not (rows.min() >= 0 and rows.max() < num_rows):
        raise InvalidArgumentError(
            f"ids are from {rows.min()} to {rows.max()}; allowed are 0 to {num_rows - 1}"
        )
    return params[rows]


def _embedding_lookup(out: Any, params: Any, ids: Any) -> VJP:
    shape, rows = shape_of(params), _on_host(ids).ravel()
    return lambda g: IndexedSlices(np.reshape(g, (rows.size, *shape[1:])), rows, shape)


def _index_into(out: Any, x: Any, index: Any) -> VJP:
    shape = shape_of(x)
    within = index if isinstance(index, tuple) else (index,)
    if all(isinstance(each, _BASIC) for each in within):
        return lambda g: _put_back(g, index, shape)

    def vjp(g: Any) -> Any:
        read = _positions(shape)[tuple(map(_on_host, within))].ravel()
        whole = _added_by_position(np.reshape(g, (-1,)), read, math.prod(shape))
        return np.reshape(whole, shape)

    return vjp


def _put_back(values: Any, index: Any, shape: Shape) -> Any:
    """Writes ``values`` to a basic index of zeros of ``shape``."""
    whole = np.zeros_like(values, shape=shape)
    whole[index] = values
    return whole


def _added_by_position(values: Any, positions: Any, size: int) -> Any:
    return IndexedSlices(values, positions, (size,)).to_dense()


def _positions(shape: Shape) -> Any:
    """The position of each element, in row-major order."""
    return np.arange(math.prod(shape)).reshape(shape)


def _on_host(index: Any) -> Any:
    """Converts an array of an index to NumPy."""
    if isinstance(index, slice | type(None) | type(Ellipsis)):
        return index
    indices = np.asarray(host_array([*index] if isinstance(index, range) else index))
    return indices if indices.size or indices.dtype == bool else indices.astype(np.int64)


def _by_position(function: Any) -> None:
    """Implements an operation that moves or copies elements, by the positions that it reads."""

    def composed(a: Any, *args: Any, **kwargs: Any) -> Any:
        return np.ravel(a)[function(_positions(a.shape), *args, **kwargs)]

    COMPOSED[function] = composed


def _take(a: Any, indices: Any, axis: Any = None, _out: Any = None, mode: Any = "raise") -> Any:
    """``np.take``; along the first axis it gathers rows."""
    read = _on_host(indices)
    if axis is not None and not normalized(axis, a.ndim):
        return embedding_lookup(a, np.take(np.arange(len(a)), read, mode=mode))
    return np.ravel(a)[np.take(_positions(a.shape), read, axis, mode=mode)]


def _take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    return np.ravel(arr)[np.take_along_axis(_positions(arr.shape), _on_host(indices), axis)]


RULES[index_into] = _index_into
RULES[embedding_lookup] = _embedding_lookup
COMPOSED[np.take] = _take
COMPOSED[np.take_along_axis] = _take_along_axis
_by_position(np.repeat)
_by_position(np.diagonal)
