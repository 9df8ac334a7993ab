"""Derivative rules of reductions and cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .array_methods import astype
from .registry import COMPOSED, CONSTANT, RULES, VJP, Maker
from .rules_broadcast import gradient_of_sum, is_half, kept_shape, reduced_axes, shape_of, widened
from .rules_elementwise import chosen
from .unsupported import no_rule


def _num_reduced(shape: tuple[int, ...], axis: Any) -> int:
    return math.prod(shape[index] for index in reduced_axes(axis, len(shape)))


def _over(g: Any, count: float) -> Any:
    """``g / count`` in the dtype of ``g``; NumPy 1 would return float64 for a scalar.

    float16 ends at 65504, so a larger count would be infinite.
    """
    share = g / count if count < 60_000 else g * (1 / count)
    return share if share.dtype == g.dtype else share.astype(g.dtype)


def _reduction(function: Any, vjp: Callable[..., VJP], parameters: str) -> None:
    """Registers the rule of a reduction.

    Args:
        function: of NumPy.
        vjp: takes the result, the operand and the axis; that of var and std ``ddof`` too.
        parameters: of ``function``, after the operand; those that the rule does not support in
            brackets.
    """
    names = [name.strip("[]") for name in parameters.split()]
    supported = set(parameters.split())

    def rule(out: Any, a: Any, *args: Any, **kwargs: Any) -> tuple[Maker]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        for key, value in arguments.items():
            if key not in supported and value is not None and value is not True:
                raise no_rule(f"np.{function.__name__}(..., {key}=)")
        extra = [arguments.get("ddof", 0)] if "ddof" in supported else []
        return (lambda: vjp(out, a, arguments.get("axis"), *extra),)

    RULES[function] = rule


def _sum(out: Any, a: Any, axis: Any) -> VJP:
    shape = shape_of(a)
    return lambda g: gradient_of_sum(g, shape, axis)


def _mean(out: Any, a: Any, axis: Any) -> VJP:
    shape = shape_of(a)
    count = _num_reduced(shape, axis)
    return lambda g: gradient_of_sum(_over(g, count), shape, axis)


def _extreme(out: Any, a: Any, axis: Any) -> VJP:
    """The rule of max and min; equal extremes share the gradient, as in TensorFlow."""
    kept = kept_shape(shape_of(a), axis)
    mask = a == np.reshape(out, kept)
    axes = reduced_axes(axis, len(kept))
    count = np.sum(mask, axis=axes, keepdims=True).astype(a.dtype)
    return lambda g: chosen(mask, np.broadcast_to(np.reshape(g, kept) / count, mask.shape))


def _prod(out: Any, a: Any, axis: Any) -> VJP:
    """The rule of ``np.prod``; multiplies the other elements, without a division."""
    shape = shape_of(a)
    axes = reduced_axes(axis, len(shape))
    order = [index for index in range(len(shape)) if index not in axes] + list(axes)
    moved = [shape[index] for index in order]
    rows = (*moved[: len(shape) - len(axes)], math.prod(moved[len(shape) - len(axes) :]))

    def vjp(g: Any) -> Any:
        x = np.reshape(np.transpose(a, order), rows)
        others = _product_before(x) * np.flip(_product_before(np.flip(x, -1)), -1)
        back = [order.index(index) for index in range(len(shape))]
        return gradient_of_sum(g, shape, axis) * np.transpose(np.reshape(others, moved), back)

    return vjp


def _product_before(x: Any) -> Any:
    """The product of all earlier elements along the last axis, in O(log n) steps."""
    product = np.concatenate([np.ones_like(x[..., :1]), x[..., :-1]], axis=-1)
    step = 1
    while step < x.shape[-1]:
        start = np.ones_like(product[..., :step])
        product = product * np.concatenate([start, product[..., :-step]], axis=-1)
        step *= 2
    return product


def _centred(a: Any, axis: Any) -> Any:
    x32 = widened(a)
    found = x32 - np.mean(x32, axis=axis, keepdims=True)
    return astype(found, a.dtype) if is_half(a) else found


def _var(out: Any, a: Any, axis: Any, ddof: Any) -> VJP:
    shape = shape_of(a)
    count = max(_num_reduced(shape, axis) - ddof, 0)
    axes = reduced_axes(axis, len(shape))
    return lambda g: gradient_of_sum(_over(g, count / 2), shape, axis) * _centred(a, axes)


def _std(out: Any, a: Any, axis: Any, ddof: Any) -> VJP:
    """The rule of ``np.std``; zero if all are equal, where it has no derivative."""
    of_var = _var(out, a, axis, ddof)
    return lambda g: of_var(g * 0.5 / np.where(out == 0, np.ones_like(out), out))


def _cumsum(out: Any, a: Any, axis: Any) -> VJP:
    shape = shape_of(a)
    along = 0 if axis is None else axis

    def vjp(g: Any) -> Any:
        summed = np.flip(np.cumsum(np.flip(widened(g), along), axis=along), along)
        return np.reshape(astype(summed, g.dtype) if is_half(g) else summed, shape)

    return vjp


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    of_vectors = x.ndim == 1 if axis is None else np.size(axis) == 1
    if ord is not None and not (ord == 2 and of_vectors):
        raise no_rule(f"np.linalg.norm(..., ord={ord!r})")
    return np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims))


_reduction(np.sum, _sum, "axis dtype [out] keepdims initial [where]")  # initial is only added
_reduction(np.mean, _mean, "axis dtype [out] keepdims [where]")
_reduction(np.prod, _prod, "axis dtype [out] keepdims [initial] [where]")
_reduction(np.var, _var, "axis dtype [out] ddof keepdims [where]")
_reduction(np.std, _std, "axis dtype [out] ddof keepdims [where]")
_reduction(np.cumsum, _cumsum, "axis dtype [out]")
for function in (np.max, np.amax, np.min, np.amin):
    _reduction(function, _extreme, "axis [out] keepdims [initial] [where]")
COMPOSED[np.linalg.norm] = _norm

CONSTANT |= {
    np.argmax, np.argmin, np.argsort, np.all, np.any, np.count_nonzero, np.nonzero, np.argwhere,
    np.flatnonzero, np.searchsorted,
}  # fmt: skip
