"""Which rows of a sparse array become one: a plan made of the indices on the host; never adds.

Source: own. Sorting first gives every row of the result its terms in one fixed order, which
floating-point atomics do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Indices", "Segments", "each_row", "joined_indices", "plan_segments"]

Indices = np.ndarray  # for rooms that hold indices and import no array library


@dataclass(frozen=True, eq=False)
class Segments:
    """Rows with the same index, side by side.

    Attributes:
        indices: int64, ``(num_segments,)``: every index once, rising.
        order: int64, ``(num_rows,)``: the rows sorted by index, those of one index as they came.
        bounds: int64, ``(num_segments + 1,)``: segment s is ``order[bounds[s]:bounds[s + 1]]``,
            and holds at least one row.
    """

    indices: np.ndarray
    order: np.ndarray
    bounds: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows that go into the segments."""
        return self.order.size

    @property
    def num_segments(self) -> int:
        """Rows that come out."""
        return self.indices.size


def plan_segments(indices: np.ndarray) -> Segments:
    """The segments of rows with these indices, in ``O(n log n)``.

    Args:
        indices: int64, ``(num_rows,)``, in any order and as often as they like; only read.
    """
    order = np.argsort(indices, kind="stable").astype(np.int64, copy=False)
    ranked = indices[order]
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1])[: ranked.size])
    bounds = np.append(starts, ranked.size).astype(np.int64, copy=False)
    return Segments(ranked[starts], order, bounds)


def each_row(num_rows: int) -> Segments:
    """Every row a segment of its own, in the order in which they are."""
    return Segments(np.arange(num_rows), np.arange(num_rows), np.arange(num_rows + 1))


def joined_indices(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The indices of several sparse arrays, one after the other; at least one array."""
    return np.concatenate(parts)
