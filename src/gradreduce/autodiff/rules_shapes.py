"""Derivative rules of operations that change shapes or join arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradreduce.sums.aggregation import accumulate_n, add_n, aggregate

from .registry import COMPOSED, RULES, VJP, normalize_axis, shape_of
from .rules_elementwise import itself
from .unsupported import no_rule


def _reshape(out: Any, a: Any, *args: Any, **kwargs: Any) -> VJP:
    """The rule of operations that keep the elements and their order."""
    if any(isinstance(each, str) and each != "C" for each in (*args, *kwargs.values())):
        raise no_rule("np.reshape(..., order=) other than 'C'")
    shape = shape_of(a)
    return lambda g: np.reshape(g, shape)


def _transpose_back(g: Any, axes: Any) -> Any:
    order = None if axes is None else [normalize_axis(axis, len(axes)) for axis in axes]
    return np.transpose(g, None if order is None else np.argsort(order).tolist())


def _roll_back(g: Any, shift: Any, axis: Any) -> Any:
    back = tuple(-each for each in shift) if isinstance(shift, tuple | list) else -shift
    return np.roll(g, back, axis)


def _concatenate(
    out: Any, arrays: Sequence[Any], axis: Any = 0, _out: Any = None, **kwargs: Any
) -> tuple[list[VJP]]:
    shapes = [shape_of(array) for array in arrays]

    def vjp(item: int) -> VJP:
        shape = shapes[item]
        along = normalize_axis(axis or 0, len(shape))
        extents = [math.prod(each) if axis is None else each[along] for each in shapes]
        start = sum(extents[:item])
        part = (slice(None),) * along + (slice(start, start + extents[item]),)
        return lambda g: np.reshape(g[part], shape)

    return ([vjp(item) for item in range(len(shapes))],)


def _sum_of(
    out: Any,
    inputs: Sequence[Any],
    *args: Any,
    output_type: str | None = None,
    weights: Sequence[float] | None = None,
    **kwargs: Any,
) -> tuple[list[VJP]]:
    """The rule of ``add_n`` and similar sums: each term gets the gradient times its weight."""
    if output_type not in (None, "numpy", "cupy"):
        raise no_rule(f"a sum with output_type={output_type!r}")
    if weights is not None:
        return ([partial(np.multiply, out.dtype.type(weight)) for weight in weights],)
    return ([itself] * len(inputs),)


def _tile(A: Any, reps: Any) -> Any:  # NumPy's name
    times = [int(each) for each in np.ravel(reps)]
    shape = [1] * (len(times) - A.ndim) + list(A.shape)
    times = [1] * (len(shape) - len(times)) + times
    inner = [each for extent in shape for each in (1, extent)]
    outer = [each for pair in zip(times, shape, strict=True) for each in pair]
    repeated = np.broadcast_to(np.reshape(A, inner), outer)
    return np.reshape(repeated, [a * b for a, b in zip(times, shape, strict=True)])


def _at_least_2d(x: Any, *, column: bool = False) -> Any:
    if len(shape_of(x)) > 1:
        return x
    return np.reshape(x, (-1, 1) if column else (1, -1))


def _hstack(tup: Sequence[Any]) -> Any:
    flat = [np.reshape(each, (-1,)) if not shape_of(each) else each for each in tup]
    return np.concatenate(flat, axis=0 if len(shape_of(flat[0])) == 1 else 1)


def _broadcast_arrays(*args: Any) -> Any:
    shape = np.broadcast_shapes(*(shape_of(each) for each in args))
    return [np.broadcast_to(each, shape) for each in args]


RULES[np.reshape] = RULES[np.ravel] = _reshape
RULES[np.expand_dims] = RULES[np.squeeze] = _reshape
RULES[np.transpose] = lambda out, a, axes=None: partial(_transpose_back, axes=axes)
RULES[np.swapaxes] = lambda out, a, axis1, axis2: lambda g: np.swapaxes(g, axis1, axis2)
RULES[np.moveaxis] = lambda out, a, source, destination: (
    lambda g: np.moveaxis(g, destination, source)
)
RULES[np.flip] = lambda out, m, axis=None: lambda g: np.flip(g, axis)
RULES[np.roll] = lambda out, a, shift, axis=None: partial(_roll_back, shift=shift, axis=axis)
RULES[np.broadcast_to] = lambda out, array, shape, subok=False: itself
RULES[np.concatenate] = _concatenate
RULES[add_n] = RULES[accumulate_n] = RULES[aggregate] = _sum_of
COMPOSED.update(
    {
        np.stack: lambda arrays, axis=0: np.concatenate(
            [np.expand_dims(each, axis) for each in arrays], axis
        ),
        np.vstack: lambda tup: np.concatenate([_at_least_2d(each) for each in tup]),
        np.hstack: _hstack,
        np.column_stack: lambda tup: np.concatenate(
            [_at_least_2d(each, column=True) for each in tup], axis=1
        ),
        np.split: np.split.__wrapped__,  # type: ignore[attr-defined]  # NumPy's own: it slices
        np.array_split: np.array_split.__wrapped__,  # type: ignore[attr-defined]
        np.tile: _tile,
        np.broadcast_arrays: _broadcast_arrays,
        np.trace: lambda a, *axes, **options: np.sum(np.diagonal(a, *axes, **options), axis=-1),
    }
)
