"""Staging memory: uploads many small host arrays in one copy, call after call."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradreduce.device import Buffer, Device, DType, flat_layout

from .convert import to_buffer

Wanted = tuple[Device, DType, tuple[int, ...]]  # of an array: where it is to lie, and what it is

# To share an array costs as much as to copy it twice: 3 us for 8 KiB (two busy cores, 2026-11). On
# a GPU, where nothing is shared, an upload costs more than that.
SMALL_BYTES = 1 << 13


class Staging(threading.local):
    """Keeps staging memory for the small arrays of repeated calls, for each thread its own.

    Args:
        wanted: of each array.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._host: list[np.ndarray | None] | None = None  # of each array, if it is small
        self._parts: list[Buffer | None] = []  # likewise, on its device
        self._flat_buffers: list[tuple[Buffer, np.ndarray]] = []

    def staged(self, arrays: Sequence[Any]) -> list[Buffer] | None:
        """Returns these NumPy arrays as Buffers, small ones copied; None if one is anything else.

        The next call in this thread overwrites them, in the order of the compute queues.
        """
        host = self._host or self._made()
        found: list[Buffer] = []
        for array, here, part, (device, dtype, shape) in zip(
            arrays, host, self._parts, self._wanted, strict=True
        ):
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
            if here is None or part is None:
                found.append(to_buffer(array, device))
            elif is_owned_by_numpy(array):
                here[...] = array
                found.append(part)
            else:
                return None
        for flat, filled in self._flat_buffers:
            flat.device.upload(filled, out=flat)
        return found

    def _made(self) -> list[np.ndarray | None]:
        host: list[np.ndarray | None] = [None] * len(self._wanted)
        self._parts = [None] * len(self._wanted)
        self._flat_buffers = []
        indices: dict[tuple[Device, str], list[int]] = {}
        for index, (device, dtype, shape) in enumerate(self._wanted):
            if math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
                indices.setdefault((device, dtype.name), []).append(index)
        for (device, _), group in indices.items():
            shapes = [self._wanted[index][2] for index in group]
            dtype = self._wanted[group[0]][1]
            layout = flat_layout([math.prod(shape) for shape in shapes], dtype.itemsize)
            flat, array = device.empty((layout.size,), dtype), np.zeros(layout.size, dtype)
            self._flat_buffers.append((flat, array))
            for index, start, size, shape in zip(
                group, layout.offsets, layout.sizes, shapes, strict=True
            ):
                host[index] = array[start : start + size].reshape(shape)
                self._parts[index] = flat.view(start, shape)
        self._host = host  # last: it says that all is there
        return host


def is_owned_by_numpy(array: np.ndarray) -> bool:
    """Whether NumPy owns the array's memory, so that it is no view of a Variable."""
    base = array.base
    return base is None or (type(base) is np.ndarray and base.base is None)
