"""Derivative rules of elementwise operations, with broadcasting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradreduce.arrays.array_methods import astype

from .frameworks import stop_gradient
from .registry import COMPOSED, CONSTANT, RULES, VJP

LN2, LN10 = math.log(2.0), math.log(10.0)


def itself(g: Any) -> Any:
    """The VJP of an operand that is added."""
    return g


def select(mask: Any) -> tuple[VJP, VJP]:
    """Returns the VJPs of ``x`` and ``y`` for ``np.where(mask, x, y)``.

    ``np.where`` is used because ``g * mask`` is NaN where an infinite gradient is masked out.
    """
    return (
        lambda g: np.where(mask, g, np.zeros_like(g)),
        lambda g: np.where(mask, np.zeros_like(g), g),
    )


def _array(x: Any) -> Any:
    """Converts a list to an array; returns a Python number, which has no dtype, unchanged."""
    return np.asarray(x) if isinstance(x, list | tuple) else x


def _power(out: Any, x: Any, y: Any) -> tuple[VJP, VJP]:
    x, y = _array(x), _array(y)
    return (
        lambda g: g * (y * x ** (y - (y != 0))),  # where y is 0 this is 0, also for x = 0
        lambda g: g * (out * _log_of_base(x)),
    )


def _log_of_base(x: Any) -> Any:
    """0 where ``x`` is 0 and, as in TensorFlow, negative, where the derivative is undefined."""
    if hasattr(x, "dtype"):
        return np.log(np.where(x > 0, x, np.ones_like(x)))
    return math.log(x) if x > 0 else 0.0


# Each VJP keeps only what it uses: that of exp keeps the result, that of log the operand.
RULES |= {
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
    np.add: lambda out, x, y: (itself, itself),
    np.subtract: lambda out, x, y: (itself, lambda g: -g),
    np.multiply: lambda out, x, y: (lambda g: g * y, lambda g: g * x),
    np.divide: lambda out, x, y: (lambda g: g / y, lambda g: -g * out / y),
    np.power: _power,
    np.float_power: _power,
    np.remainder: lambda out, x, y: (itself, lambda g: -g * np.floor_divide(x, y)),
    np.arctan2: lambda out, x, y: (
        lambda g: g * (y / (np.square(x) + np.square(y))),
        lambda g: g * (-x / (np.square(x) + np.square(y))),
    ),
    np.hypot: lambda out, x, y: (lambda g: g * (x / out), lambda g: g * (y / out)),
    np.logaddexp: lambda out, x, y: (
        lambda g: g * np.exp(x - out),
        lambda g: g * np.exp(y - out),
    ),
    # Where both operands are equal, the first gets the gradient, as in TensorFlow. fmax and fmin
    # ignore NaN operands.
    np.maximum: lambda out, x, y: select(np.greater_equal(x, y)),
    np.minimum: lambda out, x, y: select(np.less_equal(x, y)),
    np.fmax: lambda out, x, y: select(np.greater_equal(x, y) | np.isnan(y)),
    np.fmin: lambda out, x, y: select(np.less_equal(x, y) | np.isnan(y)),
}
RULES[np.where] = lambda out, mask, x, y: (lambda g: None, *select(mask))
RULES[np.copy] = lambda out, x: itself
RULES[astype] = lambda out, x, dtype: itself  # ``backward`` converts the term


def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max
    raised = a if low is None else np.maximum(a, low)
    return raised if high is None else np.minimum(raised, high)


def _full_like(a: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements ``np.full_like``; the fill value may be traced."""
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
