"""Plans on the host which rows of a sparse array are summed.

Source: own. Sorting gives every row of the result its terms in one fixed order, which
floating-point atomics do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Indices = np.ndarray  # for modules that hold indices and do not import NumPy


@dataclass(frozen=True, eq=False)
class Segments:
    """The rows of a sparse array grouped by index.

    Attributes:
        indices: int64, ``(num_segments,)``: every index once, ascending.
        order: int64, ``(num_rows,)``: the rows, stably sorted by index.
        bounds: int64, ``(num_segments + 1,)``: segment s is ``order[bounds[s]:bounds[s + 1]]``,
            and has at least one row.
    """

    indices: np.ndarray
    order: np.ndarray
    bounds: np.ndarray

    @property
    def num_rows(self) -> int:
        """The number of input rows."""
        return self.order.size

    @property
    def num_segments(self) -> int:
        """The number of distinct indices."""
        return self.indices.size


def plan_segments(indices: np.ndarray) -> Segments:
    """Groups rows by these indices, in ``O(n log n)``.

    Args:
        indices: int64, ``(num_rows,)``, in any order, with or without duplicates.
    """
    order = np.argsort(indices, kind="stable").astype(np.int64, copy=False)
    ranked = indices[order]
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1])[: ranked.size])
    bounds = np.append(starts, ranked.size).astype(np.int64, copy=False)
    return Segments(ranked[starts], order, bounds)


def single_row_segments(num_rows: int) -> Segments:
    """Segments of one row each, in the order of the rows."""
    return Segments(np.arange(num_rows), np.arange(num_rows), np.arange(num_rows + 1))


def joined_indices(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the indices of at least one sparse array."""
    return np.concatenate(parts)
