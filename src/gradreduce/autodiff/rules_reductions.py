"""Derivative rules of reductions and cumulative sums.

A rule has those parameters of its NumPy function that it supports.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import numpy as np

from .registry import COMPOSED, CONSTANT, RULES, VJP
from .rules_broadcast import gradient_of_sum, kept_shape, reduced_axes, shape_of, widened
from .unsupported import no_rule


def _num_reduced(shape: tuple[int, ...], axis: Any) -> int:
    return math.prod(shape[index] for index in reduced_axes(axis, len(shape)))


def _over(g: Any, count: float) -> Any:
    """Returns ``g / count``. In float16, a count above 65504 would be infinite."""
    return g / count if count < 60_000 else g * (1 / count)


def _sum(
    out: Any, a: Any, axis: Any = None, dtype: Any = None, _out: Any = None, keepdims: bool = False
) -> VJP:
    shape = shape_of(a)
    return lambda g: gradient_of_sum(g, shape, axis)


def _mean(
    out: Any, a: Any, axis: Any = None, dtype: Any = None, _out: Any = None, keepdims: bool = False
) -> VJP:
    shape = shape_of(a)
    count = _num_reduced(shape, axis)
    return lambda g: gradient_of_sum(_over(g, count), shape, axis)


def _extreme(out: Any, a: Any, axis: Any = None, _out: Any = None, keepdims: bool = False) -> VJP:
    """The rule of max and min. Equal extremes share the gradient, as in TensorFlow."""
    kept = kept_shape(shape_of(a), axis)
    mask = a == np.reshape(out, kept)
    axes = reduced_axes(axis, len(kept))
    count = np.sum(mask, axis=axes, keepdims=True).astype(a.dtype)

    def vjp(g: Any) -> Any:
        share = np.broadcast_to(np.reshape(g, kept) / count, mask.shape)
        return np.where(mask, share, np.zeros_like(share))

    return vjp


def _prod(
    out: Any, a: Any, axis: Any = None, dtype: Any = None, _out: Any = None, keepdims: bool = False
) -> VJP:
    """The rule of ``np.prod``: the derivative is the product of all other elements.

    The product is divided by an element to get the product of the others. If one element is zero,
    only this element has a nonzero derivative; if several are zero, none has.
    """
    shape = shape_of(a)
    axes = reduced_axes(axis, len(shape))

    def vjp(g: Any) -> Any:
        x32 = widened(a)
        zeros = x32 == 0
        divisors = np.where(zeros, np.ones_like(x32), x32)
        others = np.prod(divisors, axis=axes, keepdims=True) / divisors
        has_slope = np.sum(zeros, axis=axes, keepdims=True) == zeros
        slopes = np.where(has_slope, others, np.zeros_like(others)).astype(a.dtype)
        return gradient_of_sum(g, shape, axis) * slopes

    return vjp


def _var(
    out: Any,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    _out: Any = None,
    ddof: float = 0,
    keepdims: bool = False,
) -> VJP:
    shape = shape_of(a)
    count = max(_num_reduced(shape, axis) - ddof, 0)
    axes = reduced_axes(axis, len(shape))

    def vjp(g: Any) -> Any:
        x32 = widened(a)
        centred = (x32 - np.mean(x32, axis=axes, keepdims=True)).astype(a.dtype)
        return gradient_of_sum(_over(g, count / 2), shape, axis) * centred

    return vjp


@wraps(_var)  # _by_rule reads the signature
def _std(out: Any, a: Any, *args: Any, **kwargs: Any) -> VJP:
    """The rule of ``np.std``; zero if all elements are equal, where it is undefined."""
    of_var = _var(out, a, *args, **kwargs)
    return lambda g: of_var(_over(g, 2) / np.where(out == 0, np.ones_like(out), out))


def _cumsum(out: Any, a: Any, axis: Any = None, dtype: Any = None, _out: Any = None) -> VJP:
    shape = shape_of(a)
    along = 0 if axis is None else axis

    def vjp(g: Any) -> Any:
        summed = np.flip(np.cumsum(np.flip(widened(g), along), axis=along), along)
        return np.reshape(summed.astype(g.dtype), shape)

    return vjp


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    of_vectors = x.ndim == 1 if axis is None else np.size(axis) == 1
    if ord is not None and not (ord == 2 and of_vectors):
        raise no_rule(f"np.linalg.norm(..., ord={ord!r})")
    return np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims))


RULES[np.sum] = _sum
RULES[np.mean] = _mean
RULES[np.prod] = _prod
RULES[np.var] = _var
RULES[np.std] = _std
RULES[np.cumsum] = _cumsum
RULES[np.max] = RULES[np.amax] = RULES[np.min] = RULES[np.amin] = _extreme
COMPOSED[np.linalg.norm] = _norm

CONSTANT |= {
    np.argmax, np.argmin, np.argsort, np.all, np.any, np.count_nonzero, np.nonzero, np.argwhere,
    np.flatnonzero, np.searchsorted,
}  # fmt: skip
