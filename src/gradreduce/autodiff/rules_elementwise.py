"""Derivative rules of elementwise operations, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import astype

from .frameworks import stop_gradient
from .registry import COMPOSED, CONSTANT, RULES, VJP
from .rules_broadcast import scaled

LN2, LN10 = math.log(2.0), math.log(10.0)


def itself(g: Any) -> Any:
    """The VJP of an operand that is only added."""
    return g


def select(mask: Any, x: Any, y: Any) -> tuple[VJP, VJP]:
    """The VJPs of two operands: the result is ``x`` where ``mask`` is true, else ``y``.

    Unlike ``g * mask`` also for an infinite gradient.
    """
    return (
        scaled(x, lambda g: np.where(mask, g, np.zeros_like(g))),
        scaled(y, lambda g: np.where(mask, np.zeros_like(g), g)),
    )


def _array(x: Any) -> Any:
    """Converts a list to an array; a Python number stays, because it has no dtype."""
    return np.asarray(x) if isinstance(x, list | tuple) else x


def _power_left(out: Any, x: Any, y: Any) -> VJP:
    y = _array(y)
    return lambda g: g * (y * x ** (y - (y != 0)))  # of x**0 it is 0, also where x is 0


def _power_right(out: Any, x: Any, y: Any) -> VJP:
    x = _array(x)
    # 0**y is 0 wherever it has a slope; of a negative x it has none: 0, as in TensorFlow.
    if hasattr(x, "dtype"):
        return lambda g: g * (out * np.log(np.where(x > 0, x, np.ones_like(x))))
    log = math.log(x) if x > 0 else 0.0
    return lambda g: g * (out * log)


# Each VJP holds only what it uses: exp the result, log the operand.
_OF_ONE: dict[Any, Callable[[Any, Any], VJP]] = {
    np.negative: lambda out, x: lambda g: -g,
    np.positive: lambda out, x: itself,
    np.exp: lambda out, x: lambda g: g * out,
    np.exp2: lambda out, x: lambda g: g * (out * LN2),
    np.expm1: lambda out, x: lambda g: g * (out + 1),
    np.log: lambda out, x: lambda g: g / x,
    np.log2: lambda out, x: lambda g: g / (x * LN2),
    np.log10: lambda out, x: lambda g: g / (x * LN10),
    np.log1p: lambda out, x: lambda g: g / (x + 1),
    np.sqrt: lambda out, x: lambda g: g * 0.5 / out,
    np.cbrt: lambda out, x: lambda g: g / (3 * np.square(out)),
    np.square: lambda out, x: lambda g: g * (2 * x),
    np.reciprocal: lambda out, x: lambda g: -g * np.square(out),
    np.absolute: lambda out, x: lambda g: g * np.sign(x),
    np.fabs: lambda out, x: lambda g: g * np.sign(x),
    np.sin: lambda out, x: lambda g: g * np.cos(x),
    np.cos: lambda out, x: lambda g: -g * np.sin(x),
    np.tan: lambda out, x: lambda g: g * (1 + np.square(out)),
    np.arcsin: lambda out, x: lambda g: g / np.sqrt(1 - np.square(x)),
    np.arccos: lambda out, x: lambda g: -g / np.sqrt(1 - np.square(x)),
    np.arctan: lambda out, x: lambda g: g / (1 + np.square(x)),
    np.sinh: lambda out, x: lambda g: g * np.cosh(x),
    np.cosh: lambda out, x: lambda g: g * np.sinh(x),
    np.tanh: lambda out, x: lambda g: g * (1 - np.square(out)),
    np.arcsinh: lambda out, x: lambda g: g / np.sqrt(np.square(x) + 1),
    np.arccosh: lambda out, x: lambda g: g / np.sqrt(np.square(x) - 1),
    np.arctanh: lambda out, x: lambda g: g / (1 - np.square(x)),
}

# The VJP of either operand. What changes by broadcasting is undone.
_OF_TWO: dict[Any, tuple[Callable[[Any, Any, Any], VJP], Callable[[Any, Any, Any], VJP]]] = {
    np.add: (lambda out, x, y: itself, lambda out, x, y: itself),
    np.subtract: (lambda out, x, y: itself, lambda out, x, y: lambda g: -g),
    np.multiply: (lambda out, x, y: lambda g: g * y, lambda out, x, y: lambda g: g * x),
    np.divide: (lambda out, x, y: lambda g: g / y, lambda out, x, y: lambda g: -g * out / y),
    np.power: (_power_left, _power_right),
    np.float_power: (_power_left, _power_right),
    np.remainder: (
        lambda out, x, y: itself,
        lambda out, x, y: lambda g: -g * np.floor_divide(x, y),
    ),
    np.arctan2: (
        lambda out, x, y: lambda g: g * (y / (np.square(x) + np.square(y))),
        lambda out, x, y: lambda g: g * (-x / (np.square(x) + np.square(y))),
    ),
    np.hypot: (
        lambda out, x, y: lambda g: g * (x / out),
        lambda out, x, y: lambda g: g * (y / out),
    ),
    np.logaddexp: (
        lambda out, x, y: lambda g: g * np.exp(x - out),
        lambda out, x, y: lambda g: g * np.exp(y - out),
    ),
}


def _register(function: Any, left: Callable[..., VJP], right: Callable[..., VJP]) -> None:
    RULES[function] = lambda out, x, y: (
        scaled(x, left(out, x, y)),
        scaled(y, right(out, x, y)),
    )


for _function, _vjps in _OF_TWO.items():
    _register(_function, *_vjps)
RULES.update(_OF_ONE)
# Of equal values the first gets all, as in TensorFlow. fmax and fmin ignore a NaN operand.
RULES[np.maximum] = lambda out, x, y: select(np.greater_equal(x, y), x, y)
RULES[np.minimum] = lambda out, x, y: select(np.less_equal(x, y), x, y)
RULES[np.fmax] = lambda out, x, y: select(np.greater_equal(x, y) | np.isnan(y), x, y)
RULES[np.fmin] = lambda out, x, y: select(np.less_equal(x, y) | np.isnan(y), x, y)
RULES[np.where] = lambda out, mask, x, y: (lambda g: None, *select(mask, x, y))
RULES[np.copy] = lambda out, x: itself
RULES[astype] = lambda out, x, dtype: itself  # the tape gives a term the dtype of its tensor


def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max
    raised = a if low is None else np.maximum(a, low)
    return raised if high is None else np.minimum(raised, high)


def _full_like(a: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
    """``np.full_like``, also with a traced fill value."""
    ones = np.ones_like(a, *args, **kwargs)
    return (ones * fill_value).astype(ones.dtype)


COMPOSED[np.clip] = _clip
COMPOSED[np.full_like] = _full_like

CONSTANT |= {
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.logical_and, np.logical_or, np.logical_not, np.logical_xor,
    np.isnan, np.isinf, np.isfinite, np.signbit, np.sign, np.heaviside,
    np.floor, np.ceil, np.trunc, np.rint, np.round, np.around, np.fix, np.floor_divide,
    np.isclose, np.allclose, np.array_equal, np.shape, np.ndim, np.size, np.result_type,
    np.zeros_like, np.ones_like, np.empty_like, np.iscomplexobj, np.isrealobj,
    stop_gradient,
}  # fmt: skip
