"""Derivative rules of reductions and cumulative sums.

A rule has those parameters of its NumPy function that it supports: calls are checked against its
signature. It ignores those whose names begin with ``_``. It returns the function of the gradient
with what that needs of the operand: its shape, or the operand itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .registry import (
    COMPOSED,
    CONSTANT,
    RULES,
    VJP,
    Shape,
    gradient_of_sum,
    keepdims_shape,
    normalize_axes,
    shape_of,
    widen,
)
from .unsupported import no_rule


def _num_reduced(shape: Shape, axis: Any) -> int:
    return math.prod(shape[index] for index in normalize_axes(axis, len(shape)))


def _over(g: Any, count: float) -> Any:
    """Returns ``g / count``. In float16, a count above 65504 would be infinite."""
    return g / count if count < 60_000 else g * (1 / count)


def _back_of_mean(g: Any, shape: Shape, axis: Any) -> Any:
    return gradient_of_sum(_over(g, _num_reduced(shape, axis)), shape, axis)


def _extreme(out: Any, a: Any, axis: Any = None, _out: Any = None, keepdims: bool = False) -> VJP:
    """The rule of max and min. Equal extremes share the gradient, as in TensorFlow."""
    kept = keepdims_shape(shape_of(a), axis)
    mask = a == np.reshape(out, kept)
    axes = normalize_axes(axis, len(kept))
    count = np.sum(mask, axis=axes, keepdims=True).astype(a.dtype)

    def vjp(g: Any) -> Any:
        share = np.broadcast_to(np.reshape(g, kept) / count, mask.shape)
        return np.where(mask, share, np.zeros_like(share))

    return vjp


def _back_of_prod(g: Any, a: Any, axis: Any) -> Any:
    """The derivative of a product is the product of all other elements.

    The product is divided by an element to get the product of the others. If one element is zero,
    only this element has a nonzero derivative; if several are zero, none has.
    """
    x32, shape = widen(a), shape_of(a)
    axes = normalize_axes(axis, len(shape))
    zeros = x32 == 0
    divisors = np.where(zeros, np.ones_like(x32), x32)
    others = np.prod(divisors, axis=axes, keepdims=True) / divisors
    has_slope = np.sum(zeros, axis=axes, keepdims=True) == zeros
    slopes = np.where(has_slope, others, np.zeros_like(others)).astype(a.dtype)
    return gradient_of_sum(g, shape, axis) * slopes


def _back_of_var(g: Any, a: Any, axis: Any, ddof: float) -> Any:
    x32, shape = widen(a), shape_of(a)
    count = max(_num_reduced(shape, axis) - ddof, 0)
    mean = np.mean(x32, axis=normalize_axes(axis, len(shape)), keepdims=True)
    return gradient_of_sum(_over(g, count / 2), shape, axis) * (x32 - mean).astype(a.dtype)


def _back_of_std(g: Any, out: Any, a: Any, axis: Any, ddof: float) -> Any:
    """Zero if all elements are equal, where the derivative is undefined."""
    return _back_of_var(_over(g, 2) / np.where(out == 0, np.ones_like(out), out), a, axis, ddof)


def _back_of_cumsum(g: Any, shape: Shape, axis: Any) -> Any:
    along = 0 if axis is None else axis
    summed = np.flip(np.cumsum(np.flip(widen(g), along), axis=along), along)
    return np.reshape(summed.astype(g.dtype), shape)


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    of_vectors = x.ndim == 1 if axis is None else np.size(axis) == 1
    if ord is not None and not (ord == 2 and of_vectors):
        raise no_rule(f"np.linalg.norm(..., ord={ord!r})")
    return np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims))


RULES[np.sum] = lambda out, a, axis=None, dtype=None, _out=None, keepdims=False: partial(
    gradient_of_sum, shape=shape_of(a), axis=axis
)
RULES[np.mean] = lambda out, a, axis=None, dtype=None, _out=None, keepdims=False: partial(
    _back_of_mean, shape=shape_of(a), axis=axis
)
RULES[np.prod] = lambda out, a, axis=None, dtype=None, _out=None, keepdims=False: partial(
    _back_of_prod, a=a, axis=axis
)
RULES[np.var] = lambda out, a, axis=None, dtype=None, _out=None, ddof=0, keepdims=False: partial(
    _back_of_var, a=a, axis=axis, ddof=ddof
)
RULES[np.std] = lambda out, a, axis=None, dtype=None, _out=None, ddof=0, keepdims=False: partial(
    _back_of_std, out=out, a=a, axis=axis, ddof=ddof
)
RULES[np.cumsum] = lambda out, a, axis=None, dtype=None, _out=None: partial(
    _back_of_cumsum, shape=shape_of(a), axis=axis
)
RULES[np.max] = RULES[np.amax] = RULES[np.min] = RULES[np.amin] = _extreme
COMPOSED[np.linalg.norm] = _norm

CONSTANT |= {
    np.argmax, np.argmin, np.argsort, np.all, np.any, np.count_nonzero, np.nonzero, np.argwhere,
    np.flatnonzero, np.searchsorted,
}  # fmt: skip
