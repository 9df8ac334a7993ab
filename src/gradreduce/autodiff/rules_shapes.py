"""Derivative rules of operations that move or copy elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradreduce.reduce.aggregation import accumulate_n, add_n, aggregate

from .registry import COMPOSED, JOINS, RULES, VIEWS, VJP, Maker
from .rules_broadcast import like, normalized, shape_of
from .unsupported import no_rule


def _reshaped(out: Any, a: Any, *args: Any, **kwargs: Any) -> tuple[Maker]:
    """The rule of operations that keep the elements and their order."""
    if any(isinstance(each, str) and each != "C" for each in (*args, *kwargs.values())):
        raise no_rule("np.reshape(..., order=) other than 'C'")
    shape = shape_of(a)
    return (lambda: lambda g: np.reshape(g, shape),)


def _moved(function: Any, back: Callable[..., Any]) -> None:
    """Registers a rule; ``back`` takes the gradient, the operand's shape, and the arguments."""

    def rule(out: Any, operand: Any, *args: Any, **kwargs: Any) -> tuple[Maker]:
        shape = shape_of(operand)
        return (lambda: lambda g: back(g, shape, *args, **kwargs),)

    RULES[function] = rule


def _transposed_back(g: Any, shape: Any, axes: Any = None) -> Any:
    order = [normalized(axis, len(shape)) for axis in axes] if axes is not None else None
    return np.transpose(g, None if order is None else np.argsort(order).tolist())


def _rolled_back(g: Any, shape: Any, shift: Any, axis: Any = None) -> Any:
    back = tuple(-each for each in shift) if isinstance(shift, tuple | list) else -shift
    return np.roll(g, back, axis)


def _concatenate(
    out: Any, arrays: Sequence[Any], axis: Any = 0, _out: Any = None, **kwargs: Any
) -> tuple[Maker]:
    shapes = [shape_of(array) for array in arrays]

    def maker(item: int | None = None) -> Any:
        if item is None:
            return _of_rows([maker(row) for row in range(len(shapes))])
        shape = shapes[item]
        if axis is None:
            start = sum(int(np.prod(each)) for each in shapes[:item])
            stop = start + int(np.prod(shape))
            return lambda g: np.reshape(g[start:stop], shape)
        along = normalized(axis, len(shape))
        start = sum(each[along] for each in shapes[:item])
        part = (slice(None),) * along + (slice(start, start + shape[along]),)
        return lambda g: g[part]

    return (maker,)


def _stack(out: Any, arrays: Sequence[Any], axis: int = 0, _out: Any = None) -> tuple[Maker]:
    along = normalized(axis, len(out.shape))

    def maker(item: int | None = None) -> Any:
        if item is None:
            return lambda g: np.moveaxis(g, along, 0)
        part = (slice(None),) * along + (item,)
        return lambda g: g[part]

    return (maker,)


def _of_rows(vjps: Sequence[VJP]) -> VJP:
    """The VJP of an array whose rows were joined like elements of a list."""
    return lambda g: np.stack([vjp(g) for vjp in vjps])


def _repeat(a: Any, repeats: Any, axis: int | None = None) -> Any:
    """``np.repeat`` with one count for all elements."""
    if not isinstance(repeats, int | np.integer):
        raise no_rule("np.repeat(..., repeats=) other than one integer")
    if axis is None:
        a, axis = np.ravel(a), 0
    along = normalized(axis, a.ndim) + 1
    expanded = np.expand_dims(a, along)
    shape = (*expanded.shape[:along], int(repeats), *expanded.shape[along + 1 :])
    joined = [*a.shape]
    joined[along - 1] *= int(repeats)
    return np.reshape(np.broadcast_to(expanded, shape), joined)


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


def _vstack(tup: Sequence[Any]) -> Any:
    return np.concatenate([_at_least_2d(each) for each in tup], axis=0)


def _hstack(tup: Sequence[Any]) -> Any:
    flat = [np.reshape(each, (-1,)) if not shape_of(each) else each for each in tup]
    return np.concatenate(flat, axis=0 if len(shape_of(flat[0])) == 1 else 1)


def _column_stack(tup: Sequence[Any]) -> Any:
    return np.concatenate([_at_least_2d(each, column=True) for each in tup], axis=1)


def _split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[Any]:
    along = normalized(axis, ary.ndim)
    extent = ary.shape[along]
    if not np.ndim(indices_or_sections):
        sections = int(indices_or_sections)
        if extent % sections:
            raise ValueError("array split does not result in an equal division")
        cuts = [extent // sections * index for index in range(1, sections)]
    else:
        cuts = [int(each) for each in indices_or_sections]
    ends = zip([0, *cuts], [*cuts, extent], strict=True)
    return [ary[(slice(None),) * along + (slice(start, stop),)] for start, stop in ends]


def _sum_of(
    out: Any, inputs: Sequence[Any], *args: Any, output_type: str | None = None, **kwargs: Any
) -> tuple[Maker]:
    """The rule of ``add_n`` and the like: each term gets the whole gradient."""
    if output_type not in (None, "numpy", "cupy"):
        raise no_rule(f"a sum with output_type={output_type!r}")
    return (lambda item: lambda g: g,)


def _broadcast_arrays(*args: Any) -> Any:
    shape = np.broadcast_shapes(*(shape_of(each) for each in args))
    return [np.broadcast_to(each, shape) for each in args]


def _trace(a: Any) -> Any:
    return np.sum(np.diagonal(a))


def _diagonal(a: Any) -> Any:
    if a.ndim != 2:
        raise no_rule("np.diagonal of an array that is not a matrix")
    indices = np.arange(min(a.shape))
    return a[indices, indices]


RULES[np.reshape] = RULES[np.ravel] = _reshaped
RULES[np.expand_dims] = RULES[np.squeeze] = _reshaped
_moved(np.transpose, _transposed_back)
_moved(np.swapaxes, lambda g, shape, axis1, axis2: np.swapaxes(g, axis1, axis2))
_moved(np.moveaxis, lambda g, shape, source, destination: np.moveaxis(g, destination, source))
_moved(np.flip, lambda g, shape, axis=None: np.flip(g, axis))
_moved(np.roll, _rolled_back)
_moved(np.broadcast_to, lambda g, of_operand, shape, subok=False: like(g, of_operand))
RULES[np.concatenate] = _concatenate
RULES[np.stack] = _stack
RULES[add_n] = RULES[accumulate_n] = RULES[aggregate] = _sum_of
JOINS |= {np.concatenate, np.stack, add_n, accumulate_n, aggregate}
VIEWS |= {
    np.reshape, np.ravel, np.expand_dims, np.squeeze, np.transpose, np.swapaxes, np.moveaxis,
    np.flip,
}  # fmt: skip
COMPOSED.update(
    {
        np.repeat: _repeat,
        np.tile: _tile,
        np.vstack: _vstack,
        np.hstack: _hstack,
        np.column_stack: _column_stack,
        np.split: _split,
        np.broadcast_arrays: _broadcast_arrays,
        np.trace: _trace,
        np.diagonal: _diagonal,
    }
)
