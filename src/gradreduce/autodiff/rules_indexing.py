"""Derivative rules of indexing: slices, rows, integer arrays and masks.

If an element was read several times, its gradients are added. Positions are computed on the host,
and ``ops.segment_sum_command`` adds the gradients in the order in which the elements were read. So
the result is deterministic for NumPy and CuPy arrays. The gradient of rows gathered from a Variable
is ``IndexedSlices``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import index_into, traceable
from gradreduce.arrays.convert import host_array
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.errors import InvalidArgumentError

from .registry import COMPOSED, RULES, VJP, Shape, normalize_axis, shape_of

_BASIC = (int, np.integer, slice, type(None), type(Ellipsis))


@traceable
def embedding_lookup(params: Any, ids: Any) -> Any:
    """Returns the rows ``ids`` of ``params`` (tf.nn.embedding_lookup).

    If a loss uses a Variable only in this function, its gradient is ``IndexedSlices``: a row for
    each id, in order. Duplicate ids have a row each.

    Args:
        params: a Variable, a traced value or an array ``(rows, …)``.
        ids: an array or list of integers of any shape. If it is on a GPU, the host waits to copy
            it.

    Returns:
        An array of shape ``(*ids.shape, *params.shape[1:])``.

    Raises:
        TypeError: ``params`` has no rows, or ``ids`` are not integers.
        InvalidArgumentError: (a ``ValueError``) an id is negative or not below the number of rows.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> table = gr.Variable(np.float32([[0, 1], [2, 3], [4, 5]]), device=mesh.devices[0])
        >>> gr.embedding_lookup(table, [2, 0])
        array([[4., 5.],
               [0., 1.]], dtype=float32)
        >>> loss = lambda: np.sum(gr.embedding_lookup(table, [2, 0]))
        >>> [(grad, _)] = gr.GradientDescentOptimizer(0.1).compute_gradients(loss)
        >>> grad
        IndexedSlices(indices=[2, 0], values=float32[2, 2], dense_shape=(3, 2))
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
        whole = _add_by_position(np.reshape(g, (-1,)), read, math.prod(shape))
        return np.reshape(whole, shape)

    return vjp


def _put_back(values: Any, index: Any, shape: Shape) -> Any:
    """Returns zeros of ``shape`` with ``values`` at ``index``, which is a basic index."""
    whole = np.zeros_like(values, shape=shape)
    whole[index] = values
    return whole


def _add_by_position(values: Any, positions: Any, size: int) -> Any:
    return IndexedSlices(values, positions, (size,)).to_dense()


def _positions(shape: Shape) -> Any:
    """Returns an array with the row-major position of each element."""
    return np.arange(math.prod(shape)).reshape(shape)


def _on_host(index: Any) -> Any:
    """Converts an array that is part of an index to a NumPy array."""
    if isinstance(index, slice | type(None) | type(Ellipsis)):
        return index
    indices = np.asarray(host_array([*index] if isinstance(index, range) else index))
    return indices if indices.size or indices.dtype == bool else indices.astype(np.int64)


def _by_position(function: Any, a: Any, *args: Any, **kwargs: Any) -> Any:
    """Moves or copies elements by indexing with their positions."""
    return np.ravel(a)[function(_positions(a.shape), *args, **kwargs)]


def _take(a: Any, indices: Any, axis: Any = None, _out: Any = None, mode: Any = "raise") -> Any:
    """Implements ``np.take``. Along the first axis it gathers rows."""
    read = _on_host(indices)
    if axis is not None and not normalize_axis(axis, a.ndim):
        return embedding_lookup(a, np.take(np.arange(len(a)), read, mode=mode))
    return np.ravel(a)[np.take(_positions(a.shape), read, axis, mode=mode)]


RULES[index_into] = _index_into
RULES[embedding_lookup] = _embedding_lookup
COMPOSED[np.take] = _take
COMPOSED[np.take_along_axis] = lambda arr, indices, axis=-1: np.ravel(arr)[
    np.take_along_axis(_positions(arr.shape), _on_host(indices), axis)
]
COMPOSED[np.repeat] = partial(_by_position, np.repeat)
COMPOSED[np.diagonal] = partial(_by_position, np.diagonal)
