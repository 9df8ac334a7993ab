"""Pinned host memory for copies between the host and a GPU.

CuPy's pool of pinned memory rounds sizes up to powers of two, and gives nothing back to the system.
Therefore large copies are cut into chunks, and few chunks are in flight at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

# Bytes: a larger upload is cut into chunks of this size.
CHUNK = 8 << 20
# Bytes of copies in flight on one GPU of a mesh, above which uploads wait. Those below SMALL bytes
# never wait.
IN_FLIGHT, SMALL = 128 << 20, 1 << 20
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def allocate_pinned(nbytes: int, name: str) -> Any:
    """Allocates pinned memory by CuPy.

    Args:
        nbytes: the size in bytes.
        name: the name of the device, for the error.

    Raises:
        MemoryError: the host has not enough memory that can be pinned.
    """
    try:
        return cupy.cuda.alloc_pinned_memory(nbytes)
    except runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        raise MemoryError(
            f"{name}: the host cannot pin {nbytes:,} bytes of its memory for a copy: free host "
            "memory, or raise the memory limit of the container"
        ) from error


def chunks_of(array: np.ndarray, dtype: np.dtype) -> Iterable[tuple[int, np.ndarray]]:
    """Cuts a host array into chunks, each with its offset in bytes.

    A small array is returned as it is. A larger one is copied if it is not contiguous.
    """
    if array.nbytes <= CHUNK:
        return ((0, array),)
    whole, size = np.ascontiguousarray(array, dtype).reshape(-1), CHUNK // dtype.itemsize
    starts = range(0, whole.size, size)
    return ((start * dtype.itemsize, whole[start : start + size]) for start in starts)


class PinnedStaging:
    """The pinned memory of one GPU's copies, each part kept until its copy has finished.

    CuPy reuses dropped pinned memory at once, so Ctrl-C must not come between a copy and ``add``.
    """

    def __init__(self) -> None:
        # Pinned memory, its size, and an event after the copy that uses it.
        self._copies: deque[tuple[Any, int, Any]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, pinned: Any, nbytes: int, event: Any) -> None:
        """Keeps the memory of a copy until ``event`` has passed."""
        self._copies.append((pinned, nbytes, event))

    def drop(self) -> None:
        """Releases memory whose copies are done; other threads may add entries."""
        with self._lock:
            while self._copies and self._copies[0][-1].done:
                self._copies.popleft()

    def oldest(self) -> Any:
        """Returns the event to wait for before another large copy; None if few are in flight."""
        copies = self._copies.copy()
        return copies[0][-1] if sum(nbytes for _, nbytes, _ in copies) >= IN_FLIGHT else None
