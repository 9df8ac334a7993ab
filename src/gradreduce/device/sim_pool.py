"""Where a simulated device's memory comes from; never clears any.

As CuPy's pool does, it keeps freed memory by size and hands it out again as it is, so that code
which forgets to fill a buffer meets the last owner's values, not zeros.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

__all__ = ["SimPool"]

GRANULE = 512  # bytes; CuPy's pool rounds to the same
START = 256  # bytes; cudaMalloc aligns to at least this


class SimPool:
    """Free lists by size. Counters are for tests: *allocates nothing* means ``grown`` stays.

    Attributes:
        live_bytes: handed out and not yet back.
        free_bytes: kept for later.
        grown: times the system was asked for memory.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._lock = threading.Lock()
        self.live_bytes = 0
        self.free_bytes = 0
        self.grown = 0

    def take(self, nbytes: int) -> tuple[np.ndarray, int, int]:
        """Memory for ``nbytes``: the handle to give back, its address, and ``nbytes``."""
        rounded = self._rounded(nbytes)
        with self._lock:
            if self._free[rounded]:
                raw = self._free[rounded].pop()
                self.free_bytes -= rounded
            else:
                if self.free_bytes > self.live_bytes + rounded:  # sizes have changed: do not hoard
                    self._clear()
                raw = np.empty(rounded + START, np.uint8)
                self.grown += 1
            self.live_bytes += rounded
        return raw, self._start(raw), nbytes

    def give(self, raw: np.ndarray, nbytes: int) -> None:
        """Takes memory back."""
        rounded = self._rounded(nbytes)
        with self._lock:
            self.live_bytes -= rounded
            self.free_bytes += rounded
            self._free[rounded].append(raw)

    def clear(self) -> None:
        """Gives everything that is free back to the system."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._free.clear()
        self.free_bytes = 0

    @staticmethod
    def _rounded(nbytes: int) -> int:
        return max(1, -(-nbytes // GRANULE)) * GRANULE

    @staticmethod
    def _start(raw: np.ndarray) -> int:
        address: int = raw.__array_interface__["data"][0]
        return -(-address // START) * START
