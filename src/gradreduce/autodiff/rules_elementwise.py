"""Derivative rules of elementwise operations, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .array_methods import astype, stop_gradient
from .registry import COMPOSED, CONSTANT, RULES, VJP, Maker
from .rules_broadcast import scaled, shape_of

LN2, LN10 = math.log(2.0), math.log(10.0)


def one(function: Any, vjp: Callable[[Any, Any], VJP]) -> None:
    """Registers a rule of one operand; ``vjp(out, x)`` holds only what it needs."""

    def rule(out: Any, x: Any, **kwargs: Any) -> tuple[Maker]:
        return (lambda: vjp(out, x),)

    RULES[function] = rule


def two(
    function: Any, left: Callable[[Any, Any, Any], VJP], right: Callable[[Any, Any, Any], VJP]
) -> None:
    """Registers a rule of two operands, which are broadcast."""

    def rule(out: Any, x1: Any, x2: Any, **kwargs: Any) -> tuple[Maker, Maker]:
        return (
            lambda: scaled(x1, left(out, x1, x2)),
            lambda: scaled(x2, right(out, x1, x2)),
        )

    RULES[function] = rule


def itself(g: Any) -> Any:
    """The VJP of an operand that is only added."""
    return g


def chosen(mask: Any, g: Any) -> Any:
    """``g`` where ``mask`` is true, else zero; unlike g * mask also for inf."""
    return np.where(mask, g, np.zeros_like(g))


def _array(x: Any) -> Any:
    """Converts a list to an array; a Python number stays, because it has no dtype."""
    return np.asarray(x) if isinstance(x, list | tuple) else x


def _power_left(out: Any, x: Any, y: Any) -> VJP:
    y = _array(y)
    if shape_of(y) == () and not hasattr(y, "dtype"):  # a Python number
        if y == 0:
            return lambda g: np.zeros_like(g)
        return itself if y == 1 else lambda g: g * (y * x ** (y - 1))
    lower = np.where(y == 0, np.ones_like(y), y - 1)
    return lambda g: g * (y * x**lower)


def _power_right(out: Any, x: Any, y: Any) -> VJP:
    x = _array(x)
    if hasattr(x, "dtype"):
        # 0**y is 0 wherever it has a slope; of a negative x it has none: 0, as in TensorFlow.
        safe = np.where(x > 0, x, np.ones_like(x))
        return lambda g: g * (out * np.log(safe))
    base = math.log(x) if x > 0 else 0.0
    return lambda g: g * (out * base)


def _where(condition: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], VJP]:
    """The VJP of an operand that is the result where a condition of both operands is true."""

    def vjp(out: Any, x: Any, y: Any) -> VJP:
        mask = condition(x, y)
        return lambda g: chosen(mask, g)

    return vjp


def _sign_of(out: Any, x: Any) -> VJP:
    sign = np.sign(x)
    return lambda g: g * sign


# Each VJP holds only what it uses: exp the result, log the operand, add neither.
one(np.negative, lambda out, x: lambda g: -g)
one(np.positive, lambda out, x: itself)
one(np.copy, lambda out, x: itself)
one(np.exp, lambda out, x: lambda g: g * out)
one(np.exp2, lambda out, x: lambda g: g * (out * LN2))
one(np.expm1, lambda out, x: lambda g: g * (out + 1))
one(np.log, lambda out, x: lambda g: g / x)
one(np.log2, lambda out, x: lambda g: g / (x * LN2))
one(np.log10, lambda out, x: lambda g: g / (x * LN10))
one(np.log1p, lambda out, x: lambda g: g / (x + 1))
one(np.sqrt, lambda out, x: lambda g: g * 0.5 / out)
one(np.cbrt, lambda out, x: lambda g: g / (3 * np.square(out)))
one(np.square, lambda out, x: lambda g: g * (2 * x))
one(np.reciprocal, lambda out, x: lambda g: -g * np.square(out))
one(np.sin, lambda out, x: lambda g: g * np.cos(x))
one(np.cos, lambda out, x: lambda g: -g * np.sin(x))
one(np.tan, lambda out, x: lambda g: g * (1 + np.square(out)))
one(np.arcsin, lambda out, x: lambda g: g / np.sqrt(1 - np.square(x)))
one(np.arccos, lambda out, x: lambda g: -g / np.sqrt(1 - np.square(x)))
one(np.arctan, lambda out, x: lambda g: g / (1 + np.square(x)))
one(np.sinh, lambda out, x: lambda g: g * np.cosh(x))
one(np.cosh, lambda out, x: lambda g: g * np.sinh(x))
one(np.tanh, lambda out, x: lambda g: g * (1 - np.square(out)))
one(np.arcsinh, lambda out, x: lambda g: g / np.sqrt(np.square(x) + 1))
one(np.arccosh, lambda out, x: lambda g: g / np.sqrt(np.square(x) - 1))
one(np.arctanh, lambda out, x: lambda g: g / (1 - np.square(x)))
one(np.absolute, _sign_of)
one(np.fabs, _sign_of)

two(np.add, lambda out, x, y: itself, lambda out, x, y: itself)
two(np.subtract, lambda out, x, y: itself, lambda out, x, y: lambda g: -g)
two(np.multiply, lambda out, x, y: lambda g: g * y, lambda out, x, y: lambda g: g * x)
two(np.divide, lambda out, x, y: lambda g: g / y, lambda out, x, y: lambda g: -g * out / y)
two(np.power, _power_left, _power_right)
two(np.float_power, _power_left, _power_right)
# Of equal values the first gets all, as in TensorFlow. fmax and fmin ignore a NaN operand.
two(np.maximum, _where(np.greater_equal), _where(np.less))
two(np.minimum, _where(np.less_equal), _where(np.greater))
two(
    np.fmax,
    _where(lambda x, y: (x >= y) | np.isnan(y)),
    _where(lambda x, y: ~((x >= y) | np.isnan(y))),
)
two(
    np.fmin,
    _where(lambda x, y: (x <= y) | np.isnan(y)),
    _where(lambda x, y: ~((x <= y) | np.isnan(y))),
)
two(
    np.remainder,
    lambda out, x, y: itself,
    lambda out, x, y: lambda g: -g * np.floor_divide(x, y),
)
two(
    np.arctan2,
    lambda out, x, y: lambda g: g * (y / (np.square(x) + np.square(y))),
    lambda out, x, y: lambda g: g * (-x / (np.square(x) + np.square(y))),
)
two(
    np.hypot,
    lambda out, x, y: lambda g: g * (x / out),
    lambda out, x, y: lambda g: g * (y / out),
)
two(
    np.logaddexp,
    lambda out, x, y: lambda g: g * np.exp(x - out),
    lambda out, x, y: lambda g: g * np.exp(y - out),
)


def _choice(out: Any, condition: Any, x: Any, y: Any) -> tuple[Maker, ...]:
    return (
        lambda: lambda g: None,
        lambda: scaled(x, lambda g: chosen(condition, g)),
        lambda: scaled(y, lambda g: np.where(condition, np.zeros_like(g), g)),
    )


def _clip(
    out: Any,
    a: Any,
    a_min: Any = None,
    a_max: Any = None,
    *,
    min: Any = None,
    max: Any = None,
) -> tuple[Maker, ...]:
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max

    def inside() -> VJP:
        mask = True if low is None else a >= low
        if high is not None:
            mask = mask & (a <= high)
        return lambda g: g if mask is True else chosen(mask, g)

    def below() -> VJP:
        mask = a < low
        if high is not None:
            mask = mask & (low <= high)  # if low > high, the result is high
        return lambda g: chosen(mask, g)

    def above() -> VJP:
        mask = a > high
        if low is not None:
            mask = mask | (low > high)
        return lambda g: chosen(mask, g)

    return lambda: scaled(a, inside()), lambda: scaled(low, below()), lambda: scaled(high, above())


def _astype(out: Any, x: Any, dtype: Any) -> tuple[Maker]:
    return (lambda: itself,)  # the tape gives a term the dtype of its tensor


def _full_like(a: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
    """``np.full_like``, also with a traced fill value."""
    ones = np.ones_like(a, *args, **kwargs)
    return astype(ones * fill_value, ones.dtype)


COMPOSED[np.full_like] = _full_like
RULES[np.where] = _choice
RULES[np.clip] = _clip
RULES[astype] = _astype

CONSTANT |= {
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.logical_and, np.logical_or, np.logical_not, np.logical_xor,
    np.isnan, np.isinf, np.isfinite, np.signbit, np.sign, np.heaviside,
    np.floor, np.ceil, np.trunc, np.rint, np.round, np.around, np.fix, np.floor_divide,
    np.isclose, np.allclose, np.array_equal, np.shape, np.ndim, np.size, np.result_type,
    np.zeros_like, np.ones_like, np.empty_like, np.iscomplexobj, np.isrealobj,
    stop_gradient,
}  # fmt: skip
