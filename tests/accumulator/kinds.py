"""Dense and sparse accumulators behind one interface, for tests of what both do."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
from support.exact_data import random_data

import gradreduce as gr
from gradreduce.device import accumulate_dtype, as_dtype


def counters(*accumulators):
    """Counts, steps and numbers of dropped gradients."""
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


def slices(indices, *values):
    """Rows of float32, one for each index."""
    return gr.IndexedSlices(np.array(values, "float32").reshape(len(values), -1), indices)


def contents(taken: Any) -> Any:
    """A result in a form that compares with ``==``."""
    if isinstance(taken, list | tuple):
        return [contents(each) for each in taken]
    if isinstance(taken, gr.IndexedSlices):
        return taken.indices.tolist(), contents(taken.values), taken.dense_shape
    if isinstance(taken, gr.Mirrored):
        return [contents(each) for each in taken.values]
    if isinstance(taken, gr.Buffer):
        taken = taken.numpy()
    return taken.tolist() if isinstance(taken, np.ndarray) else taken


def mapped(grad: Any, change: Any) -> Any:
    """The gradient with another array, or with other values of its rows."""
    if isinstance(grad, gr.IndexedSlices):
        return gr.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)
    return change(grad)


def bits(taken: Any) -> Any:
    """Like ``contents``, but with the dtype and every bit; all NaNs are equal."""
    if isinstance(taken, gr.Mirrored | list):
        return [bits(each) for each in getattr(taken, "values", taken)]
    if isinstance(taken, gr.IndexedSlices):
        return taken.indices.tolist(), bits(taken.values), taken.dense_shape
    array = np.array(taken.numpy() if isinstance(taken, gr.Buffer) else taken)
    array[np.isnan(array)] = np.nan
    return str(array.dtype), array.shape, array.tobytes()


def _by_index(grad: Any) -> dict[int | None, np.ndarray]:
    """The rows of a gradient in its accumulate type, equal ones added; a dense one is one row."""
    wide: dict[int | None, np.ndarray] = {}
    if not isinstance(grad, gr.IndexedSlices):
        return {None: grad.astype(accumulate_dtype(grad.dtype))}
    values = grad.values.astype(accumulate_dtype(grad.values.dtype))
    for index, row in zip(grad.indices.tolist(), values, strict=True):
        wide[index] = wide[index] + row if index in wide else row
    return wide


def _in_order(partials: list[Any]) -> Any:
    """Adds them left to right."""
    return list(itertools.accumulate(partials))[-1]


def _in_halves(partials: list[Any]) -> Any:
    """The order of hierarchical_copy: two groups, each added left to right."""
    split = len(partials) // 2
    return _in_order(partials[:split]) + _in_order(partials[split:])


def expected(by_device: Any, dtype: Any, mean: str = "per_row", *, in_halves: bool = False) -> Any:
    """The bits of a take: gradients of each device in order, then the sums of the devices.

    Args:
        mean: ``"SUM"``, or the ``sparse_mean`` of a mean.
    """
    wide, partials, counts = accumulate_dtype(as_dtype(dtype)), defaultdict(list), {}
    add = _in_halves if in_halves else _in_order
    with np.errstate(all="ignore"):
        for gradients in by_device:
            partial: dict[int | None, np.ndarray] = {}
            for grad in gradients:
                for index, row in _by_index(grad).items():
                    added = row.astype(wide)
                    partial[index] = partial[index] + added if index in partial else added
                    counts[index] = counts.get(index, 0) + 1
            for index, row in partial.items():
                partials[index].append(row)
        total = {index: add(rows) for index, rows in partials.items()}
        if mean == "per_gradient":
            counts = dict.fromkeys(total, sum(map(len, by_device)))
        if mean != "SUM":
            total = {index: row / wide.type(counts[index]) for index, row in total.items()}
        if None in total:
            return bits(np.asarray(total[None]).astype(dtype))
        found, row_shape = sorted(total), by_device[0][0].values.shape[1:]
        rows = np.array([total[index] for index in found], wide).reshape(-1, *row_shape)
        return found, bits(rows.astype(dtype)), (-1, *row_shape)


MEANS = ["SUM", "per_row", "per_gradient"]


def options_of(kind: type[Dense | Sparse], mean: str) -> dict[str, str]:
    """The options of an accumulator with one of ``MEANS``, which for dense sums are two."""
    if mean == "SUM":
        return {"reduction_type": "SUM"}
    return {"sparse_mean": mean} if kind is Sparse else {"reduction_type": "MEAN"}


class Dense:
    """Makes dense accumulators and their gradients."""

    make = gr.ConditionalAccumulator

    @staticmethod
    def value(value: float, dtype: Any = "float32") -> Any:
        """A gradient of two elements."""
        return np.full(2, value, dtype)

    @staticmethod
    def result(value: float) -> Any:
        """The contents of a result of such gradients."""
        return [value] * 2

    @staticmethod
    def random(seed: int, dtype: Any, shape: tuple[int, ...] = (19,)) -> Any:
        return random_data(shape, dtype, seed=seed)


class Sparse:
    """Makes sparse accumulators and their gradients."""

    make = gr.SparseConditionalAccumulator

    @staticmethod
    def value(value: float, dtype: Any = "float32") -> Any:
        """A gradient of two rows."""
        return gr.IndexedSlices(np.full((2, 2), value, dtype), [3, 1])

    @staticmethod
    def result(value: float) -> Any:
        """The contents of a result of such gradients."""
        return [1, 3], [[value] * 2] * 2, (-1, 2)

    @staticmethod
    def random(seed: int, dtype: Any, shape: tuple[int, ...] = (19,)) -> Any:
        """A gradient with rows of this shape in any order, some twice; sometimes none."""
        luck = np.random.default_rng(seed)
        indices = luck.integers(0, 12, luck.integers(0, 9))
        return gr.IndexedSlices(random_data((len(indices), *shape), dtype, seed=seed), indices)


KINDS = {"dense": Dense, "sparse": Sparse}
