"""Address ranges of buffers, for queries of overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Buffer


class Ranges:
    """Sorted address ranges of disjoint buffers, for repeated overlap queries.

    Args:
        buffers: buffers that do not overlap.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        starts = np.array([buffer.address for buffer in buffers], np.uint64)
        order = np.argsort(starts)
        self._starts = starts[order]
        sizes = np.array([buffer.nbytes for buffer in buffers], np.uint64)
        self._ends = self._starts + sizes[order]

    def find_overlap(self, buffers: Sequence[Buffer]) -> int | None:
        """Returns the index of the first of ``buffers`` that overlaps a range, or None."""
        starts = np.array([buffer.address for buffer in buffers], np.uint64)
        ends = starts + np.array([buffer.nbytes for buffer in buffers], np.uint64)
        before = np.searchsorted(self._starts, ends)  # how many begin before its end
        shares = (before > 0) & (ends > starts)
        shares &= starts < self._ends[before - 1] if self._ends.size else False
        return int(shares.argmax()) if shares.any() else None
