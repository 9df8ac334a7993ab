"""One table of all operations that a loss may use, with operands to test them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradreduce as gr

Shape = tuple[int, ...]

SHAPES: list[Shape] = [(), (4,), (2, 3), (0, 3), (2, 1, 3)]
PAIRS: list[tuple[Shape, ...]] = [
    ((2, 3), (2, 3)), ((), (3,)), ((2, 3), ()), ((2, 1), (3,)), ((3,), (4, 1, 3)), ((0, 3), (1, 3)),
    ((1,), (1, 1)), ((2, 1, 3), (4, 1)),
]  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation."""

    name: str  # the name of its test
    # Computes the operation; takes NumPy or HIPS autograd's NumPy module, and the operands.
    do: Callable[..., Any]
    shapes: Sequence[tuple[Shape, ...]]  # the operands' shapes, one entry per case
    low: float = -1.7  # the smallest value of an operand
    high: float = 1.7  # the largest value of an operand
    # Computes the same by operations that HIPS autograd supports, if ``do`` uses others.
    oracle: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name

    def operands(self, shapes: tuple[Shape, ...], dtype: str = "float64") -> list[np.ndarray]:
        """Operands with distinct elements (no ties), none near zero."""
        rng = np.random.default_rng(len(self.name))
        sizes = [int(np.prod(shape)) for shape in shapes]
        values = np.linspace(self.low, self.high, 2 * sum(sizes) + 2)[::2][: sum(sizes)] + 0.0137
        rng.shuffle(values)
        cuts = np.cumsum([0, *sizes])
        return [
            values[start:stop].reshape(shape).astype(dtype)
            for start, stop, shape in zip(cuts[:-1], cuts[1:], shapes, strict=True)
        ]


def one(name: str, **options: Any) -> Operation:
    return Operation(
        name, lambda np, x: getattr(np, name)(x), [(shape,) for shape in SHAPES], **options
    )


def two(name: str, **options: Any) -> Operation:
    return Operation(name, lambda np, x, y: getattr(np, name)(x, y), PAIRS, **options)


def of(name: str, do: Callable[..., Any], *shapes: Any, **options: Any) -> Operation:
    """An operation on operands with these shapes: one tuple of shapes per case."""
    return Operation(name, do, shapes, **options)


POSITIVE = {"low": 0.3, "high": 2.9}
INSIDE = {"low": -0.9, "high": 0.9}

ELEMENTWISE = [
    *[one(name) for name in "negative exp exp2 expm1 square sin cos tanh sinh cosh".split()],
    *[one(name) for name in "arcsinh arctan reciprocal absolute fabs".split()],
    of("copy", lambda np, x: np.copy(x) * 2, ((2, 3),), oracle=lambda np, x: x * 2),
    one("positive", oracle=lambda np, x: x * 1),
    one("tan", **INSIDE),
    *[one(name, **POSITIVE) for name in "log log2 log10 log1p sqrt".split()],
    one("cbrt", **POSITIVE, oracle=lambda np, x: x ** (1 / 3)),
    *[one(name, **INSIDE) for name in "arcsin arccos arctanh".split()],
    one("arccosh", low=1.2, high=3.0),
    *[two(name) for name in "add subtract multiply divide arctan2 logaddexp".split()],
    two("hypot"),
    two("power", **POSITIVE),
    two("float_power", **POSITIVE, oracle=lambda np, x, y: x**y),
    two("remainder", **POSITIVE),
    *[two(name) for name in "maximum minimum fmax fmin".split()],
    of("operators", lambda np, x, y: (2 - x) / (y * y + 3) + x**3 - (-y) * 2.5, *PAIRS),
    of("power of numbers", lambda np, x: x**2 + x**3 + x**1 + x**-1, ((3,),), ((),)),
    of("number to a power", lambda np, x: 2.0**x, ((3,),), ((),)),
    of("relu", lambda np, x: gr.autodiff.relu(x), *[(s,) for s in SHAPES],
       oracle=lambda np, x: np.maximum(x, 0)),
    of("sigmoid", lambda np, x: gr.autodiff.sigmoid(x), *[(s,) for s in SHAPES],
       oracle=lambda np, x: 1 / (1 + np.exp(-x))),
    of("where", lambda np, x, y: np.where(x > y, x, y * 2), *PAIRS,
       oracle=lambda np, x, y: np.where(x > y, x + 0 * y, y * 2 + 0 * x)),
    of("where of a number", lambda np, x: np.where(x > 0.1, x, 0.0), ((2, 3),)),
    of("clip", lambda np, x: np.clip(x, -0.9, 0.8), *[(s,) for s in SHAPES]),
    of("clip at one end", lambda np, x: x.clip(None, 0.8), ((5,),)),
    of("clip at traced ends", lambda np, x, y: np.clip(x, y - 1, y + 0.5), ((2, 3), (3,)),
       oracle=lambda np, x, y: np.minimum(np.maximum(x, y - 1), y + 0.5)),
    of("astype", lambda np, x: x.astype(x.dtype) * 2, ((2, 3),)),
]  # fmt: skip

SEVERAL_AXES: list[Any] = [((3, 4),), ((2, 3, 4),)]


def reduction(name: str, **options: Any) -> list[Operation]:
    def over(axis: Any, keepdims: bool) -> Callable[..., Any]:
        return lambda np, x: getattr(np, name)(x, axis=axis, keepdims=keepdims)

    ways = [(None, False), (None, True), (0, False), (-1, True), ((0, 2), False), ((-1, 0), True)]
    return [
        of(f"{name} over {axis}{' kept' if keepdims else ''}", over(axis, keepdims), ((2, 3, 4),),
           **options)
        for axis, keepdims in ways
    ]  # fmt: skip


REDUCTIONS = [
    *reduction("sum"),
    *reduction("mean"),
    *reduction("prod", **POSITIVE),
    *reduction("max"),
    *reduction("min"),
    *reduction("var"),
    *reduction("std"),
    of("scalars", lambda np, x: np.sum(x) + np.mean(x) + np.max(x) + np.prod(x), ((),)),
    of("empty", lambda np, x: np.sum(x, axis=0) + np.sum(x), ((0, 3),)),
    of("var of a sample", lambda np, x: np.var(x, axis=0, ddof=1), ((4, 3),)),
    of("std of a sample", lambda np, x: x.std(ddof=1), ((4, 3),)),
    of("methods", lambda np, x: x.sum(0) * x.mean() + x.max(axis=0) - x.min() + x.var(),
       ((2, 3),)),
    of("cumsum", lambda np, x: np.cumsum(x, axis=1), ((3, 4),)),
    of("cumsum of all", lambda np, x: np.cumsum(x), ((3, 4),)),
    of("norm", lambda np, x: np.linalg.norm(x), ((3, 4),)),
    of("norm of rows", lambda np, x: np.linalg.norm(x, axis=1, keepdims=True), ((3, 4),),
       oracle=lambda np, x: np.sqrt(np.sum(x**2, axis=1, keepdims=True))),
    of("logsumexp", lambda np, x: gr.autodiff.logsumexp(x), ((2, 3),), ((),),
       oracle=lambda np, x: log_sum(np, x, None)),
    of("logsumexp of rows", lambda np, x: gr.autodiff.logsumexp(x, axis=-1, keepdims=True),
       ((2, 3),), oracle=lambda np, x: log_sum(np, x, -1)),
    of("logsumexp over two", lambda np, x: gr.autodiff.logsumexp(x, axis=(0, -1)), ((2, 3, 4),),
       oracle=lambda np, x: log_sum(np, x, (0, -1))[0, :, 0]),
    of("softmax cross-entropy", lambda np, x, y: gr.autodiff.softmax_cross_entropy(x, y),
       ((4, 3), (4, 3)), ((3,), (3,)), low=0.2, high=2.0,
       oracle=lambda np, x, y: -np.sum(y * (x - log_sum(np, x, -1)), axis=-1)),
    of("softmax cross-entropy of classes",
       lambda np, x: gr.autodiff.softmax_cross_entropy(x, like(x, [2, 0, 1, 1])), ((4, 3),),
       oracle=lambda np, x: log_sum(np, x, -1)[:, 0] - x[[0, 1, 2, 3], [2, 0, 1, 1]]),
]  # fmt: skip


def log_sum(np: Any, x: Any, axis: Any) -> Any:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=axis is not None))


def like(x: Any, values: Any) -> Any:
    """An integer array in the library of ``x``, which may be a traced value."""
    while hasattr(x, "value"):
        x = x.value
    return np.asarray(values, like=x)


LINEAR = [
    of("matmul", lambda np, x, y: np.matmul(x, y), ((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 2)),
       ((2, 3), (3,)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((1, 2, 3), (5, 3, 4)),
       ((3,), (5, 3, 2)), ((5, 2, 3), (3,)), ((0, 3), (3, 2))),
    of("@", lambda np, x, y: x @ y, ((2, 3), (3, 4))),
    of("dot", lambda np, x, y: np.dot(x, y), ((2, 3), (3, 4)), ((3,), (3,)), ((), (3,)),
       ((2, 3), (3,)), ((2, 2, 3), (3,)), ((2, 2, 3), (2, 3, 2))),
    of("inner", lambda np, x, y: np.inner(x, y), ((3,), (3,)), ((2, 3), (4, 3))),
    of("outer", lambda np, x, y: np.outer(x, y), ((3,), (2,))),
    of("vdot", lambda np, x, y: np.vdot(x, y), ((2, 3), (2, 3)),
       oracle=lambda np, x, y: np.sum(x * y)),
    of("tensordot", lambda np, x, y: np.tensordot(x, y), ((2, 3, 4), (3, 4, 2))),
    of("tensordot over 1", lambda np, x, y: np.tensordot(x, y, 1), ((2, 3), (3, 4))),
    of("tensordot over 0", lambda np, x, y: np.tensordot(x, y, 0), ((2,), (3, 2))),
    of("tensordot over axes", lambda np, x, y: np.tensordot(x, y, axes=[[0, -1], [2, 0]]),
       ((2, 3, 4), (4, 2, 2))),
    of("tensordot over axes in another order",
       lambda np, x, y: np.tensordot(x, y, axes=[[2, 0], [0, 1]]), ((2, 3, 4), (4, 2, 2))),
    of("tensordot over an axis", lambda np, x, y: np.tensordot(x, y, axes=(1, -1)),
       ((2, 3), (4, 3))),
    of("einsum", lambda np, x, y: np.einsum("ij,jk->ki", x, y), ((2, 3), (3, 4))),
    of("einsum without arrow", lambda np, x, y: np.einsum("bij,bjk", x, y),
       ((2, 2, 3), (2, 3, 2))),
    of("einsum of a sum", lambda np, x: np.einsum("ij->i", x), ((2, 3),)),
    of("einsum of a transpose", lambda np, x: np.einsum("ijk->kij", x), ((2, 3, 4),)),
    of("einsum of three", lambda np, x, y, z: np.einsum("i,ij,jk->k", x, y, z),
       ((2,), (2, 3), (3, 2))),
    of("einsum of an ellipsis", lambda np, x, y: np.einsum("...ij,...jk->...ik", x, y),
       ((2, 2, 3), (2, 3, 2)), ((2, 2, 3), (3, 2)), ((1, 2, 3), (4, 3, 2))),
    of("einsum of an ellipsis without arrow", lambda np, x, y: np.einsum("...i,i", x, y),
       ((2, 2, 3), (3,))),
    of("einsum of a scale", lambda np, x, y: np.einsum("ij,->ji", x, y), ((2, 3), ())),
]  # fmt: skip

SHAPING = [
    of("reshape", lambda np, x: np.reshape(x, (4, -1)), ((2, 6),), ((4, 0),)),
    of("reshape method", lambda np, x: x.reshape(3, 4) * x.reshape((3, 4)), ((2, 6),)),
    of("reshape to a scalar", lambda np, x: np.reshape(x, ()), ((1, 1),)),
    of("ravel", lambda np, x: np.ravel(x) * x.flatten(), ((2, 3),)),
    of("transpose", lambda np, x: np.transpose(x), *SEVERAL_AXES),
    of("transpose of axes", lambda np, x: np.transpose(x, (2, 0, -2)), ((2, 3, 4),),
       oracle=lambda np, x: np.transpose(x, (2, 0, 1))),
    of("transpose method", lambda np, x: x.transpose(1, 0, 2) * x.T[0, 0, 0], ((3, 2, 4),),
       oracle=lambda np, x: np.swapaxes(x, 0, 1) * x[0, 0, 0]),
    of("swapaxes", lambda np, x: np.swapaxes(x, 0, -1), *SEVERAL_AXES),
    of("moveaxis", lambda np, x: np.moveaxis(x, 0, -1), *SEVERAL_AXES),
    of("moveaxis of two", lambda np, x: np.moveaxis(x, [0, 1], [2, 0]), ((2, 3, 4),)),
    of("squeeze", lambda np, x: np.squeeze(x), ((1, 3, 1),)),
    of("squeeze of an axis", lambda np, x: np.squeeze(x, axis=-1), ((1, 3, 1),)),
    of("expand_dims", lambda np, x: np.expand_dims(x, -1), ((2, 3),), ((),)),
    of("broadcast_to", lambda np, x: np.broadcast_to(x, (2, 3, 4)), ((3, 1),), ((),),
       oracle=lambda np, x: x * np.ones((2, 3, 4))),
    of("flip", lambda np, x: np.flip(x, 0), ((2, 3),), oracle=lambda np, x: x[::-1]),
    of("roll", lambda np, x: np.roll(x, 2, axis=1), ((2, 3),)),
    of("roll of two", lambda np, x: np.roll(x, (1, -2), axis=(0, 1)), ((2, 3),),
       oracle=lambda np, x: np.roll(np.roll(x, 1, axis=0), -2, axis=1)),
    of("concatenate", lambda np, x, y: np.concatenate([x, y, x * 2], axis=1), ((2, 3), (2, 1)),
       ((2, 0), (2, 2))),
    of("concatenate from the back", lambda np, x, y: np.concatenate((x, y), axis=-1),
       ((2, 3), (2, 1))),
    of("concatenate flat", lambda np, x, y: np.concatenate([x, y], axis=None), ((2, 3), (2,)),
       oracle=lambda np, x, y: np.concatenate([np.ravel(x), y])),
    of("stack", lambda np, x, y: np.stack([x, y, x], axis=-1), ((2, 3), (2, 3)), ((), ())),
    of("concatenate of rows", lambda np, x: np.concatenate(x * 1, axis=-1), ((2, 2, 3),),
       oracle=lambda np, x: np.concatenate([x[0], x[1]], axis=-1)),
    of("stack of rows", lambda np, x: np.stack(x * 1, axis=1), ((3, 2),),
       oracle=lambda np, x: x.T),
    of("vstack", lambda np, x, y: np.vstack([x, y]), ((3,), (2, 3))),
    of("hstack", lambda np, x, y: np.hstack([x, y]), ((3,), (2,)), ((2, 3), (2, 1))),
    of("column_stack", lambda np, x, y: np.column_stack([x, y]), ((3,), (3, 2))),
    of("split", lambda np, x: np.split(x, 2, axis=1)[1] * np.split(x, [1, 3], axis=1)[1],
       ((2, 4),)),
    of("repeat", lambda np, x: np.repeat(x, 3, axis=1), ((2, 3),)),
    of("repeat of counts", lambda np, x: np.repeat(x, [2, 0, 1], axis=1), ((2, 3),),
       oracle=lambda np, x: x[:, [0, 0, 2]]),
    of("repeat of all", lambda np, x: np.repeat(x, 2), ((2, 3),)),
    of("tile", lambda np, x: np.tile(x, (2, 1, 3)), ((2, 3),)),
    of("tile once", lambda np, x: np.tile(x, 2), ((2, 3),),
       oracle=lambda np, x: np.concatenate([x, x], axis=1)),
    of("trace", lambda np, x: np.trace(x) * np.diagonal(x), ((3, 3),), ((2, 3),),
       oracle=lambda np, x: np.sum(x * eye(x)) * np.sum(x * eye(x), axis=1)),
    of("trace of a diagonal", lambda np, x: np.trace(x, 1), ((3, 3),),
       oracle=lambda np, x: x[0, 1] + x[1, 2]),
    of("broadcast_arrays", lambda np, x, y: (lambda a, b: a * b)(*np.broadcast_arrays(x, y)),
       ((3,), (2, 1)), oracle=lambda np, x, y: x * y),
]  # fmt: skip

COLUMNS = np.array([[1], [0]])
PAIR = np.array([[2, 0]])


def eye(x: Any) -> Any:
    return np.eye(*x.shape)


INDEXING = [
    of("an element", lambda np, x: x[1, -1], ((2, 3),)),
    of("slices", lambda np, x: x[::-1, 1:], ((3, 4),), ((0, 4),)),
    of("a new axis", lambda np, x: x[None, ..., 0], ((2, 3),)),
    of("rows", lambda np, x: x[1] + x[0], ((2, 3),)),
    of("iteration", lambda np, x: sum(row * (place + 1) for place, row in enumerate(x)),
       ((3, 2),)),
    of("fancy rows", lambda np, x: x[[0, 2, 2, -1]], ((3, 2),)),
    of("fancy elements", lambda np, x: x[[0, 1, 1], [2, 0, 0]], ((2, 3),)),
    of("fancy and a slice", lambda np, x: x[:, [0, 0, 2]], ((2, 3),)),
    of("fancy matrix", lambda np, x: x[[[0, 1], [1, 1]]], ((3, 2),)),
    of("fancy nothing", lambda np, x: x[[]], ((3, 2),)),
    of("take", lambda np, x: np.take(x, [0, 2, 2, -1], axis=0), ((3, 2),),
       oracle=lambda np, x: x[[0, 2, 2, -1]]),
    of("take of columns", lambda np, x: x.take([[0, 1], [1, 1]], axis=-1), ((3, 2),),
       oracle=lambda np, x: x[:, [[0, 1], [1, 1]]]),
    of("take of all", lambda np, x: np.take(x, [5, 0, 5]), ((3, 2),),
       oracle=lambda np, x: np.ravel(x)[[5, 0, 5]]),
    of("embedding_lookup", lambda np, x: gr.embedding_lookup(x, [[0, 2], [2, 1]]), ((3, 2),),
       oracle=lambda np, x: x[[[0, 2], [2, 1]]]),
    of("mask", lambda np, x: x[[True, False, True]], ((3, 2),), oracle=lambda np, x: x[[0, 2]]),
    of("take_along_axis", lambda np, x: np.take_along_axis(x, COLUMNS, axis=1), ((2, 3),),
       oracle=lambda np, x: x[[[0], [1]], COLUMNS]),
    of("take_along_axis of all", lambda np, x: np.take_along_axis(x, PAIR[0], axis=None),
       ((2, 2),), oracle=lambda np, x: np.ravel(x)[PAIR[0]]),
    of("take_along_axis of one row of places", lambda np, x: np.take_along_axis(x, PAIR, axis=1),
       ((3, 4),), oracle=lambda np, x: x[:, [2, 0]]),
    of("take_along_axis of one row", lambda np, x: np.take_along_axis(x, COLUMNS, axis=-1),
       ((1, 4),), oracle=lambda np, x: x[0][COLUMNS]),
]  # fmt: skip

OPERATIONS = [*ELEMENTWISE, *REDUCTIONS, *LINEAR, *SHAPING, *INDEXING]


def weighted(operation: Operation, module: Any, library: Callable[[Any], Any] = np.asarray) -> Any:
    """The operation as a loss; each element of the result has its own weight."""

    def loss(*operands):
        made = operation.do(module, *operands)
        weights = np.linspace(0.5, 1.5, int(np.prod(np.shape(made)))).reshape(np.shape(made))
        return module.sum(library(weights.astype(made.dtype)) * made)

    return loss
