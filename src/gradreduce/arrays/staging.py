"""Staging memory: uploads many small host arrays in one copy, call after call."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradreduce.device import Buffer, Device, DType, cached_property, flat_layout, group_by

from .convert import to_buffer

_Staged = tuple[np.ndarray, Buffer]  # staging memory on the host, and its copy on a device
Wanted = tuple[Device, DType, tuple[int, ...]]  # device, dtype and shape of an array

# Sharing an array of 8 KiB takes as long as copying it twice: 3 us (two busy cores, 2026-11). On a
# GPU, where host arrays cannot be shared, an upload takes longer than that.
SMALL_BYTES = 1 << 13


class HostStaging(threading.local):
    """Keeps staging memory for the small arrays of repeated calls, separate for each thread.

    Args:
        wanted: device, dtype and shape of each array.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted

    def upload(self, arrays: Sequence[Any]) -> list[Buffer] | None:
        """Returns NumPy arrays as Buffers, small ones copied; None if one cannot be staged.

        The next call in this thread overwrites the Buffers, in the order of the compute queues.
        """
        places, flat_buffers = self._memory
        buffers: list[Buffer] = []
        for array, place, (device, dtype, shape) in zip(arrays, places, self._wanted, strict=True):
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
            if place is None:
                buffers.append(to_buffer(array, device))
            elif (base := array.base) is None or (type(base) is np.ndarray and base.base is None):
                place[0][...] = array  # NumPy owns its memory, so it is not a view of a Variable
                buffers.append(place[1])
            else:
                return None
        for host, flat in flat_buffers:
            flat.device.upload(host, out=flat)
        return buffers

    @cached_property
    def _memory(self) -> tuple[list[_Staged | None], list[_Staged]]:
        """Returns the destination of each small array, and the memory for each device and dtype."""
        places: list[_Staged | None] = [None] * len(self._wanted)
        flat_buffers = []
        small = [
            ((device, dtype), index)
            for index, (device, dtype, shape) in enumerate(self._wanted)
            if math.prod(shape) * dtype.itemsize <= SMALL_BYTES
        ]
        for (device, dtype), indices in group_by(small).items():
            shapes = [self._wanted[index][2] for index in indices]
            layout = flat_layout([math.prod(shape) for shape in shapes], dtype.itemsize)
            host, flat = np.zeros(layout.size, dtype), device.empty((layout.size,), dtype)
            flat_buffers.append((host, flat))
            parts = flat.parts(layout.offsets, layout.sizes, shapes)
            for index, start, part in zip(indices, layout.offsets, parts, strict=True):
                places[index] = host[start : start + part.size].reshape(part.shape), part
        return places, flat_buffers
