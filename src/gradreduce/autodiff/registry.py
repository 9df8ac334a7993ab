"""The registry of derivative rules, and what several rules share.

Rules of reductions undo the change of shape; ``backward`` undoes broadcasting. 16-bit floats are
added in float32 and rounded once, as in the kernels of ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]
#: Takes the gradient of the result of an operation; returns a term of one operand's gradient, in
#: the operand's shape or in one to which it was broadcast.
VJP = Callable[[Any], Any]

#: The rule of each operation. A rule takes the result and the arguments of the operation (for a
#: ufunc without keyword arguments). It returns the VJP of the first argument, or a sequence with
#: the VJP of each positional argument; for an argument that is a list of arrays, a list of VJPs.
#: Work that only one VJP needs belongs in that VJP, because not every argument is traced.
RULES: dict[Any, Callable[..., VJP | Sequence[VJP | list[VJP]]]] = {}
#: Operations whose result is constant or piecewise constant.
CONSTANT: set[Any] = set()
#: Operations that are computed by other operations, which are recorded instead.
COMPOSED: dict[Any, Callable[..., Any]] = {}


def shape_of(x: Any) -> Shape:
    """Returns the shape of an array or a list, or () for a Python number."""
    return tuple(np.shape(x) if isinstance(x, list | tuple) else getattr(x, "shape", ()))


def is_half(x: Any) -> bool:
    """Whether ``x`` is an array of float16 or bfloat16."""
    return str(getattr(x, "dtype", "")) in ("float16", "bfloat16")


def widen(x: Any) -> Any:
    """Converts float16 and bfloat16 to float32; returns anything else unchanged."""
    return x.astype(np.float32) if is_half(x) else x


def like(term: Any, shape: Shape) -> Any:
    """Sums ``term`` over the axes along which an operand of ``shape`` was broadcast."""
    if term.shape == shape:
        return term
    lead = len(term.shape) - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + index
        for index, extent in enumerate(shape)
        if extent == 1 and term.shape[lead + index] != 1
    )
    dtype = np.float32 if is_half(term) else None
    summed = np.sum(term, axis=axes, dtype=dtype, keepdims=True).astype(term.dtype)
    return np.reshape(summed, shape) if summed.shape != shape else summed


def normalize_axis(axis: int, ndim: int) -> int:
    """Converts a negative axis to a nonnegative one."""
    return axis + ndim if axis < 0 else axis


def normalize_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes that a reduction removes, as nonnegative numbers."""
    if axis is None:
        return tuple(range(ndim))
    axes: Sequence[int] = axis if isinstance(axis, tuple | list) else (axis,)
    return tuple(normalize_axis(int(each), ndim) for each in axes)


def keepdims_shape(shape: Shape, axis: Any) -> Shape:
    """Returns the shape of a reduction of ``shape`` with ``keepdims=True``."""
    axes = normalize_axes(axis, len(shape))
    return tuple([1 if index in axes else extent for index, extent in enumerate(shape)])


def gradient_of_sum(g: Any, shape: Shape, axis: Any) -> Any:
    """Broadcasts the gradient of a sum over ``axis`` to ``shape``, as a view."""
    return np.broadcast_to(np.reshape(g, keepdims_shape(shape, axis)), shape)
