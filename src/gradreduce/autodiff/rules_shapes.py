"""Derivative rules of operations that change shapes or join arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradreduce.reduce.aggregation import accumulate_n, add_n, aggregate

from .registry import COMPOSED, RULES, VJP
from .rules_broadcast import like, normalized, shape_of
from .unsupported import no_rule


def _reshaped(out: Any, a: Any, *args: Any, **kwargs: Any) -> VJP:
    """The rule of operations that keep the elements and their order."""
    if any(isinstance(each, str) and each != "C" for each in (*args, *kwargs.values())):
        raise no_rule("np.reshape(..., order=) other than 'C'")
    shape = shape_of(a)
    return lambda g: np.reshape(g, shape)


def _moved(function: Any, back: Callable[..., Any]) -> None:
    """Registers a rule whose VJP is ``back(gradient, shape of the operand, *arguments)``."""

    def rule(out: Any, operand: Any, *args: Any, **kwargs: Any) -> VJP:
        shape = shape_of(operand)
        return lambda g: back(g, shape, *args, **kwargs)

    RULES[function] = rule


def _transposed_back(g: Any, shape: Any, axes: Any = None) -> Any:
    order = [normalized(axis, len(shape)) for axis in axes] if axes is not None else None
    return np.transpose(g, None if order is None else np.argsort(order).tolist())


def _rolled_back(g: Any, shape: Any, shift: Any, axis: Any = None) -> Any:
    back = tuple(-each for each in shift) if isinstance(shift, tuple | list) else -shift
    return np.roll(g, back, axis)


def _concatenate(
    out: Any, arrays: Sequence[Any], axis: Any = 0, _out: Any = None, **kwargs: Any
) -> tuple[list[VJP]]:
    shapes = [shape_of(array) for array in arrays]

    def vjp(item: int) -> VJP:
        shape = shapes[item]
        along = normalized(axis or 0, len(shape))
        extents = [math.prod(each) if axis is None else each[along] for each in shapes]
        start = sum(extents[:item])
        part = (slice(None),) * along + (slice(start, start + extents[item]),)
        return lambda g: np.reshape(g[part], shape)

    return ([vjp(item) for item in range(len(shapes))],)


def _sum_of(
    out: Any, inputs: Sequence[Any], *args: Any, output_type: str | None = None, **kwargs: Any
) -> tuple[list[VJP]]:
    """The rule of ``add_n`` and similar sums: each term gets the whole gradient."""
    if output_type not in (None, "numpy", "cupy"):
        raise no_rule(f"a sum with output_type={output_type!r}")
    return ([lambda g: g] * len(inputs),)


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


RULES[np.reshape] = RULES[np.ravel] = _reshaped
RULES[np.expand_dims] = RULES[np.squeeze] = _reshaped
_moved(np.transpose, _transposed_back)
_moved(np.swapaxes, lambda g, shape, axis1, axis2: np.swapaxes(g, axis1, axis2))
_moved(np.moveaxis, lambda g, shape, source, destination: np.moveaxis(g, destination, source))
_moved(np.flip, lambda g, shape, axis=None: np.flip(g, axis))
_moved(np.roll, _rolled_back)
_moved(np.broadcast_to, lambda g, of_operand, shape, subok=False: like(g, of_operand))
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
