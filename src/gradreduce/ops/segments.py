"""Plans on the host which rows of a sparse array are summed.

Sorting fixes the order in which the terms of a row are added; with floating-point atomics the order
would vary. Not taken from another library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradreduce.device import Buffer, Device, flat_layout

Indices = np.ndarray  # for annotations in modules that do not import NumPy


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
    """Returns segments of one row each, in the order of the rows."""
    return Segments(np.arange(num_rows), np.arange(num_rows), np.arange(num_rows + 1))


def concatenate_indices(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the indices of at least one sparse array."""
    return np.concatenate(parts)


def upload_together(tensors: Sequence[Sequence[np.ndarray]], device: Device) -> list[list[Buffer]]:
    """Uploads arrays of 8-byte numbers at once, each aligned to a vector boundary."""
    parts = [part for tensor in tensors for part in tensor]
    layout = flat_layout([part.size for part in parts], 8)
    words = np.zeros(layout.size, np.int64)
    for part, offset in zip(parts, layout.offsets, strict=True):
        words[offset : offset + part.size] = part.view(np.int64)
    flat = device.upload(words)
    views = (
        flat.view(offset, part.shape, part.dtype)
        for part, offset in zip(parts, layout.offsets, strict=True)
    )
    return [[next(views) for _ in tensor] for tensor in tensors]
