"""Derivative rules of matrix and tensor products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .registry import COMPOSED, RULES, Maker
from .rules_broadcast import like, normalized, shape_of
from .unsupported import no_rule


def _matmul(out: Any, x1: Any, x2: Any, **kwargs: Any) -> tuple[Maker, Maker]:
    """The rule of ``np.matmul``; treats vectors as matrices of one row or column."""
    x1, x2 = _array(x1), _array(x2)
    left, right = x1.shape, x2.shape

    def whole(g: Any) -> Any:
        g = np.expand_dims(g, -1) if len(right) == 1 else g
        return np.expand_dims(g, -2) if len(left) == 1 else g

    def to_left() -> Any:
        other = x2[:, None] if len(right) == 1 else x2
        matrix = left if len(left) > 1 else (1, *left)
        return lambda g: np.reshape(like(whole(g) @ np.swapaxes(other, -1, -2), matrix), left)

    def to_right() -> Any:
        other = x1[None, :] if len(left) == 1 else x1
        matrix = right if len(right) > 1 else (*right, 1)
        return lambda g: np.reshape(like(np.swapaxes(other, -1, -2) @ whole(g), matrix), right)

    return to_left, to_right


def _array(x: Any) -> Any:
    """Converts a list to an array; returns arrays of any library unchanged."""
    return x if hasattr(x, "ndim") else np.asarray(x)


def _dot(a: Any, b: Any) -> Any:
    a, b = _array(a), _array(b)
    if _scalar(a, b):
        return np.multiply(a, b)
    if b.ndim <= 2 and a.ndim <= 2:
        return np.matmul(a, b)
    return np.tensordot(a, b, axes=(-1, -2 if b.ndim > 1 else 0))


def _scalar(a: Any, b: Any) -> bool:
    """Whether one of the operands is zero-dimensional."""
    return not shape_of(a) or not shape_of(b)


def _inner(a: Any, b: Any) -> Any:
    a, b = _array(a), _array(b)
    if _scalar(a, b):
        return np.multiply(a, b)
    return np.tensordot(a, b, axes=(-1, -1))


def _outer(a: Any, b: Any) -> Any:
    return np.reshape(a, (-1, 1)) * np.reshape(b, (1, -1))


def _vdot(a: Any, b: Any) -> Any:
    return np.matmul(np.ravel(a), np.ravel(b))


def _axes(axes: Any, left: int, right: int) -> tuple[list[int], list[int]]:
    """The axes of each operand over which ``tensordot`` sums, nonnegative."""
    if isinstance(axes, Sequence | np.ndarray):
        first, second = axes
        return [normalized(int(x), left) for x in np.ravel(first)], [
            normalized(int(x), right) for x in np.ravel(second)
        ]
    return list(range(left - axes, left)), list(range(axes))


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """``np.tensordot`` as the product of two matrices, as NumPy computes it."""
    a, b = _array(a), _array(b)
    summed, summed_too = _axes(axes, a.ndim, b.ndim)
    free = [index for index in range(a.ndim) if index not in summed]
    free_too = [index for index in range(b.ndim) if index not in summed_too]
    left, right = np.transpose(a, free + summed), np.transpose(b, summed_too + free_too)
    shape, shape_too = left.shape[: len(free)], right.shape[len(summed) :]
    if left.shape[len(free) :] != right.shape[: len(summed)]:
        raise ValueError("shape-mismatch for sum")
    count = math.prod(left.shape[len(free) :])
    left = np.reshape(left, (math.prod(shape), count))
    return np.reshape(left @ np.reshape(right, (count, math.prod(shape_too))), shape + shape_too)


def _labels(subscripts: str, operands: Sequence[Any]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with the ellipsis expanded.

    Raises:
        NotImplementedError: a letter occurs twice in one operand.
    """
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    unused = [chr(code) for code in range(ord("A"), ord("z")) if chr(code).isalpha()]
    unused = [letter for letter in unused if letter not in subscripts]
    ranks = [
        len(shape_of(operand)) - len(term.replace("...", ""))
        for operand, term in zip(operands, terms, strict=True)
    ]
    widest = max([rank for rank, term in zip(ranks, terms, strict=True) if "..." in term] or [0])
    extra = "".join(unused[:widest])
    if not arrow:
        once = sorted(x for x in set(inputs) if x.isalpha() and inputs.count(x) == 1)
        result = ("..." if "..." in inputs else "") + "".join(once)
    spelled = [
        term.replace("...", extra[widest - rank :] if "..." in term else "")
        for rank, term in zip(ranks, terms, strict=True)
    ]
    if any(len(set(term)) != len(term) for term in spelled):
        raise no_rule(f"np.einsum({subscripts!r}), with a letter twice in one operand,")
    return spelled, result.replace("...", extra)


def _einsum(out: Any, subscripts: Any, *operands: Any, **kwargs: Any) -> tuple[Maker, ...]:
    if not isinstance(subscripts, str):
        raise no_rule("np.einsum without a string of subscripts")
    labels, result = _labels(subscripts, operands)

    def maker(index: int) -> Maker:
        mine, shape = labels[index], shape_of(operands[index])
        rest = [operand for other, operand in enumerate(operands) if other != index]
        of_rest = [label for other, label in enumerate(labels) if other != index]
        known = set(result).union(*of_rest)
        there = "".join(letter for letter in mine if letter in known)
        formula = f"{','.join([result, *of_rest])}->{there}"
        kept = [index for index, letter in enumerate(mine) if letter in known]

        def vjp(g: Any) -> Any:
            found = np.einsum(formula, g, *rest)
            if len(kept) < len(mine):  # a letter of this operand only, which was summed over
                extents = iter(shape_of(found))
                open_shape = [next(extents) if x in kept else 1 for x in range(len(mine))]
                found = np.reshape(found, open_shape)
            narrow = tuple(
                1 if extent == 1 else now
                for extent, now in zip(shape, shape_of(found), strict=True)
            )
            return np.broadcast_to(like(found, narrow), shape)

        return lambda: vjp

    return (lambda: None, *(maker(index) for index in range(len(operands))))  # type: ignore[return-value,arg-type]


RULES[np.matmul] = _matmul
RULES[np.einsum] = _einsum
COMPOSED[np.tensordot] = _tensordot
COMPOSED[np.dot] = _dot
COMPOSED[np.inner] = _inner
COMPOSED[np.outer] = _outer
COMPOSED[np.vdot] = _vdot
