"""Derivative rules of matrix and tensor products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .registry import COMPOSED, RULES, VJP, like, normalize_axis
from .unsupported import no_rule


def _array(x: Any) -> Any:
    """Converts a list to an array; returns arrays of any library unchanged."""
    return x if hasattr(x, "ndim") else np.asarray(x)


def _matmul(out: Any, x1: Any, x2: Any) -> tuple[VJP, VJP]:
    """The rule of ``np.matmul``. Vectors are treated as matrices of one row or column."""
    x1, x2 = _array(x1), _array(x2)
    row = x1.shape if x1.ndim > 1 else (1, *x1.shape)
    column = x2.shape if x2.ndim > 1 else (*x2.shape, 1)
    whole = (*np.broadcast_shapes(row[:-2], column[:-2]), row[-2], column[-1])
    shapes = x1.shape, x2.shape
    left = np.swapaxes(np.reshape(x1, row), -1, -2)
    right = np.swapaxes(np.reshape(x2, column), -1, -2)
    return (
        lambda g: np.reshape(like(np.reshape(g, whole) @ right, row), shapes[0]),
        lambda g: np.reshape(like(left @ np.reshape(g, whole), column), shapes[1]),
    )


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Implements ``np.tensordot`` by the product of two matrices, as NumPy does."""
    a, b = _array(a), _array(b)
    if not isinstance(axes, Sequence | np.ndarray):
        axes = range(a.ndim - axes, a.ndim), range(axes)
    summed = [normalize_axis(int(axis), a.ndim) for axis in np.ravel(axes[0])]
    summed_too = [normalize_axis(int(axis), b.ndim) for axis in np.ravel(axes[1])]
    free = [axis for axis in range(a.ndim) if axis not in summed]
    free_too = [axis for axis in range(b.ndim) if axis not in summed_too]
    left, right = np.transpose(a, free + summed), np.transpose(b, summed_too + free_too)
    shape, shape_too = left.shape[: len(free)], right.shape[len(summed_too) :]
    if left.shape[len(free) :] != right.shape[: len(summed_too)]:
        raise ValueError("shape-mismatch for sum")
    count = math.prod(left.shape[len(free) :])
    left = np.reshape(left, (math.prod(shape), count))
    return np.reshape(left @ np.reshape(right, (count, math.prod(shape_too))), shape + shape_too)


def _dot(a: Any, b: Any) -> Any:
    a, b = _array(a), _array(b)
    if not a.shape or not b.shape:
        return np.multiply(a, b)
    if b.ndim <= 2 and a.ndim <= 2:
        return np.matmul(a, b)
    return np.tensordot(a, b, axes=(-1, -2 if b.ndim > 1 else 0))


def _einsum(out: Any, subscripts: Any, *operands: Any, optimize: bool = False) -> Sequence[VJP]:
    """The rule of ``np.einsum``: a term is an einsum of gradient and other operands."""
    if not isinstance(subscripts, str):
        raise no_rule("np.einsum without a string of subscripts")
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if any(len(set(label.replace(".", ""))) != len(label.replace(".", "")) for label in labels):
        raise no_rule(f"np.einsum({subscripts!r}), with a letter twice in one operand,")
    if any("..." in label[1:] for label in labels):
        raise no_rule(f"np.einsum({subscripts!r}), with an ellipsis that is not in front,")
    if not arrow:
        once = sorted(x for x in set(inputs) if x.isalpha() and inputs.count(x) == 1)
        result = ("..." if "..." in inputs else "") + "".join(once)

    dots = "..." if "..." in inputs else ""

    def vjp(index: int) -> VJP:
        factors, of_factors = [*operands], [*labels]
        del factors[index], of_factors[index]
        mine = labels[index].replace(".", "")
        # An index that only this operand has was summed over: its gradient is broadcast.
        if not set(mine) <= set("".join([result, *of_factors])):
            factors.append(np.ones_like(operands[index]))
            of_factors.append(labels[index])
        formula = f"{','.join([result, *of_factors])}->{dots}{mine}"
        return lambda g: np.einsum(formula, g, *factors, optimize=optimize)

    return [lambda g: None, *map(vjp, range(len(operands)))]


RULES[np.matmul] = _matmul
RULES[np.einsum] = _einsum
COMPOSED[np.tensordot] = _tensordot
COMPOSED[np.dot] = _dot
COMPOSED[np.inner] = lambda a, b: np.dot(a, np.swapaxes(b, -1, -2) if np.ndim(b) > 1 else b)
COMPOSED[np.outer] = lambda a, b: np.reshape(a, (-1, 1)) * np.reshape(b, (1, -1))
COMPOSED[np.vdot] = lambda a, b: np.matmul(np.ravel(a), np.ravel(b))
