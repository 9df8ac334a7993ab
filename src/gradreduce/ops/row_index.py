"""Which row of a growing sum holds which index: host data beside the rows; never adds.

Rows of a sparse sum lie in the order in which their indices came first, so that a gradient adds to
those that are there and lays down new ones behind them, and none is ever moved but to grow. They
are put into the order of their indices once, when they are handed out. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from .segment_sum import Divisor
from .segments import Segments, plan_segments

__all__ = ["RowIndex", "alike", "merged_row_index"]

# Gradients whose touched rows are kept as they came: to count each at once would cost a pass over
# the counts of all rows for every gradient, however few it touches.
MAX_TOUCHES = 64


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Where the rows of a sparse sum lie, and how many gradients touched each.

    Attributes:
        indices: int64, ``(num_rows,)``: every index once, rising.
        places: int64, ``(num_rows,)``: the row of the sum that holds each index.
        counts: int64: for the first rows of the sum how many gradients touched each, but for
            those in ``touches``.
        touches: for each later gradient the rows that it touched, int64, none twice.
    """

    indices: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    touches: tuple[np.ndarray, ...]

    @classmethod
    def none(cls) -> Self:
        """Those of a sum without rows."""
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, ())

    @classmethod
    def of(cls, indices: np.ndarray, counts: np.ndarray) -> Self:
        """Those of rows that lie in the order of their indices, which rise."""
        return cls(indices, np.arange(indices.size), counts, ())

    @property
    def num_rows(self) -> int:
        """Rows of the sum."""
        return self.indices.size

    @property
    def by_row(self) -> np.ndarray:
        """The index of each row of the sum, int64, ``(num_rows,)``."""
        found = np.empty_like(self.indices)
        found[self.places] = self.indices
        return found

    def touched(self, indices: np.ndarray) -> tuple[Self, np.ndarray]:
        """After one more gradient, and where its rows go; these slots stay as they are.

        Args:
            indices: int64, rising: of the gradient.

        Returns:
            The new slots, and for each index its row for ``segment_sum``'s ``into``: ``~row`` of
            one that is there, behind all others the row of one that is not.
        """
        at = np.searchsorted(self.indices, indices)
        known = at < self.num_rows
        known[known] = self.indices[at[known]] == indices[known]
        fresh = ~known
        num_fresh = int(np.count_nonzero(fresh))
        rows = np.empty_like(indices)
        rows[known] = self.places[at[known]]
        rows[fresh] = np.arange(self.num_rows, self.num_rows + num_fresh)
        found, places = self.indices, self.places
        if num_fresh:
            found = np.insert(found, at[fresh], indices[fresh])
            places = np.insert(places, at[fresh], rows[fresh])
        counts, touches = self.counts, (*self.touches, rows)
        if len(touches) > MAX_TOUCHES:
            counts, touches = _counted(counts, touches, found.size), ()
        return type(self)(found, places, counts, touches), np.where(known, ~rows, rows)

    def num_touches(self) -> np.ndarray:
        """How many gradients touched each index, int64, in the order of ``indices``."""
        counts: np.ndarray = _counted(self.counts, self.touches, self.num_rows)[self.places]
        return counts


def _counted(counts: np.ndarray, touches: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """By row of the sum, all touches included."""
    total = np.zeros(num_rows, np.int64)
    total[: counts.size] = counts
    for rows in touches:
        total[rows] += 1
    return total


def merged_row_index(sums: Sequence[RowIndex], *, mean: bool) -> tuple[Segments, Divisor]:
    """How the rows of several sums, one sum behind the other, become one row for each index.

    Args:
        sums: at least one; rows of the same index are added in their order.
        mean: divide each row by the number of gradients that touched it; else by 1.

    Returns:
        The segments, and what divides the sum of each.
    """
    ends = np.cumsum([each.num_rows for each in sums])
    indices = np.concatenate(
        [each.places + end - each.num_rows for each, end in zip(sums, ends, strict=True)]
    )
    plan = plan_segments(np.concatenate([each.indices for each in sums]))
    segments = Segments(plan.indices, indices[plan.order], plan.bounds)
    if not mean or not plan.num_rows:
        return segments, 1.0
    counts = np.concatenate([each.num_touches() for each in sums])[plan.order]
    by = np.add.reduceat(counts, plan.bounds[:-1]).astype(np.float64)
    return segments, float(by[0]) if (by == by[0]).all() else by


def alike(divisors: Sequence[Divisor], segments: Sequence[Segments]) -> list[Divisor]:
    """One number if it is the same for all, else one for each segment: so one launch serves all."""
    numbers = {by for by in divisors if isinstance(by, float)}
    if len(numbers) < 2 and all(isinstance(by, float) for by in divisors):
        return list(divisors)
    return [
        np.full(plan.num_segments, by) if isinstance(by, float) else by
        for by, plan in zip(divisors, segments, strict=True)
    ]
