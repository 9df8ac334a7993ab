"""Host-side map from indices to the rows of a growing sparse sum.

The rows of a sparse sum are in the order in which their indices first occurred: a gradient adds to
existing rows and appends new ones. Rows are moved only when the memory grows. A take sorts them by
index. Not taken from another library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import numpy as np

from gradreduce.weights import from_units, parts_of, to_units

from .segment_sum import Divisor
from .segments import Segments, plan_segments

# The number of gradients whose touched rows are kept as lists. Counting at once would need a pass
# over the counts of all rows for every gradient, even if it touches few rows.
MAX_TOUCHES = 64


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Maps indices to rows of a sparse sum, and counts the gradients that touched each.

    Attributes:
        indices: int64, ``(num_rows,)``: every index once, ascending.
        rows: int64, ``(num_rows,)``: the row of the sum that holds each index.
        counts: int64: for the first rows of the sum, the number of gradients that touched each,
            not counting those in ``touches``.
        touches: for each later gradient the rows that it touched, int64, without duplicates.
        excesses: for the first rows of the sum, the sum of weight - 1 of the gradients that touched
            each, as ``_exact_sum`` returns it. None: all weights are 1.
    """

    indices: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    touches: tuple[np.ndarray, ...]
    excesses: np.ndarray | None = None

    @classmethod
    def none(cls) -> Self:
        """Returns the index of a sum without rows."""
        return cls.of(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, indices: np.ndarray, counts: np.ndarray, weights: np.ndarray | None = None) -> Self:
        """Returns the index of rows that are sorted by their indices.

        Args:
            indices: int64, ascending.
            counts: the number of gradients that touched each.
            weights: from ``weights_to_save``. None: all weights are 1.
        """
        excesses = None
        if weights is not None:
            excesses = -counts.astype(np.float64)
            for parts in weights.T:
                excesses = _exact_sum(excesses, parts)
        return cls(indices, np.arange(indices.size), counts, (), excesses)

    @property
    def num_rows(self) -> int:
        """The number of rows of the sum."""
        return self.indices.size

    def by_row(self) -> np.ndarray:
        """Returns the index of each row of the sum, in the order of the rows."""
        indices = np.empty_like(self.indices)
        indices[self.rows] = self.indices
        return indices

    def add_gradient(self, indices: np.ndarray, weight: float = 1) -> tuple[Self, np.ndarray]:
        """Returns the index after one more gradient, and the rows that it adds to.

        Args:
            indices: int64, ascending: the indices of the gradient.
            weight: the weight of the gradient.

        Returns:
            The new ``RowIndex``, and for each index its row for ``segment_sum``'s ``into``:
            ``~row`` for an existing row, the number of a new row after all others otherwise.
        """
        at = np.searchsorted(self.indices, indices)
        known = at < self.num_rows
        known[known] = self.indices[at[known]] == indices[known]
        fresh = ~known
        num_fresh = int(np.count_nonzero(fresh))
        rows = np.empty_like(indices)
        rows[known] = self.rows[at[known]]
        rows[fresh] = np.arange(self.num_rows, self.num_rows + num_fresh)
        sum_indices, sum_rows = self.indices, self.rows
        if num_fresh:
            sum_indices = np.insert(sum_indices, at[fresh], indices[fresh])
            sum_rows = np.insert(sum_rows, at[fresh], rows[fresh])
        counts, touches = self.counts, (*self.touches, rows)
        if len(touches) > MAX_TOUCHES:
            counts, touches = _count_touches(counts, touches, sum_indices.size), ()
        excesses = self.excesses
        if weight != 1:
            excesses = _extended(excesses, sum_indices.size)
            excess = _exact_sum(np.array([weight], np.float64), np.array([-1.0]))
            changed = _exact_sum(excesses[rows], excess)
            excesses = excesses if changed.dtype == np.float64 else _to_units(excesses)
            excesses[rows] = changed
        made = type(self)(sum_indices, sum_rows, counts, touches, excesses)
        return made, np.where(known, ~rows, rows)

    def num_touches(self) -> np.ndarray:
        """Returns the number of gradients that touched each index, in the order of ``indices``."""
        counts: np.ndarray = _count_touches(self.counts, self.touches, self.num_rows)[self.rows]
        return counts

    def weights(self) -> np.ndarray:
        """Returns the sum of the weights of the gradients that touched each index.

        It is as ``_exact_sum`` returns it, in the order of ``indices``.
        """
        excesses = _extended(self.excesses, self.num_rows)
        return _exact_sum(self.num_touches().astype(np.float64), excesses[self.rows])

    def weights_to_save(self) -> np.ndarray:
        """Returns ``weights`` as float64, ``(num_rows, width)``: the exact sum of each row."""
        weights = self.weights()
        if weights.dtype == np.float64:
            return weights[:, None]
        parts = [parts_of(each) for each in weights]
        width = max(map(len, parts), default=1)
        rows = [[*each, *[0.0] * (width - len(each))] for each in parts]
        return np.array(rows, np.float64).reshape(-1, width)


def _extended(excesses: np.ndarray | None, num_rows: int) -> np.ndarray:
    """Returns a copy with zeros for the rows after the first ones."""
    whole = np.zeros(num_rows, np.float64 if excesses is None else excesses.dtype)
    if excesses is not None:
        whole[: excesses.size] = excesses
    return whole


def _exact_sum(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Adds sums of weights: in float64 if that rounds no element, else as Python integers.

    Args:
        left: float64, or Python integers in the units of ``weights.py``.
        right: the same.
    """
    if left.dtype == right.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            total: np.ndarray = left + right
            # One of the differences is exact, so a rounded sum changes it.
            if ((total - left == right) & (total - right == left)).all():
                return total
    units: np.ndarray = _to_units(left) + _to_units(right)
    return units


def _to_units(weights: np.ndarray) -> np.ndarray:
    """Returns a result of ``_exact_sum`` as Python integers."""
    if weights.dtype == np.float64:
        return np.array([to_units(each) for each in weights.tolist()], object)
    return weights


def _count_touches(counts: np.ndarray, touches: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Returns the number of gradients that touched each row of the sum."""
    total = np.zeros(num_rows, np.int64)
    total[: counts.size] = counts
    for rows in touches:
        total[rows] += 1
    return total


def _by_segment(slots: RowIndex, plan: Segments) -> np.ndarray:
    """Returns the weights of a sum for each segment; 0 for a segment without a row of the sum."""
    weights = slots.weights()
    by_segment = np.zeros(plan.num_segments, weights.dtype)
    by_segment[np.searchsorted(plan.indices, slots.indices)] = weights
    return by_segment


def merge_row_index(sums: Sequence[RowIndex], *, mean: bool) -> tuple[Segments, Divisor]:
    """Plans how the concatenated rows of several sums are merged into one row per index.

    Args:
        sums: at least one; rows of the same index are added in this order.
        mean: divide each row by the sum of the weights of the gradients that touched it; else by 1.

    Returns:
        The segments, and the divisor of each.
    """
    ends = np.cumsum([each.num_rows for each in sums])
    indices = np.concatenate(
        [each.rows + end - each.num_rows for each, end in zip(sums, ends, strict=True)]
    )
    plan = plan_segments(np.concatenate([each.indices for each in sums]))
    segments = Segments(plan.indices, indices[plan.order], plan.bounds)
    if not mean or not plan.num_rows:
        return segments, 1.0
    if all([each.excesses is None for each in sums]):
        counts = np.concatenate([each.num_touches() for each in sums])[plan.order]
        by = np.add.reduceat(counts, plan.bounds[:-1]).astype(np.float64)
    else:
        by = reduce(_exact_sum, [_by_segment(each, plan) for each in sums])
        if by.dtype != np.float64:
            by = np.array(list(map(from_units, by)), np.float64)
    return segments, float(by[0]) if (by == by[0]).all() else by
