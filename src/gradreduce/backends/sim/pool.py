"""The memory pool of a simulated device.

Like CuPy's pool, it keeps freed memory by size and hands it out again unchanged. Code that forgets
to fill a buffer then reads old values, not zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import ref

import numpy as np

GRANULE = 512  # bytes; CuPy's pool rounds to the same
START = 256  # bytes; cudaMalloc aligns to at least this


class _ArrayInterface:
    """The base object of a NumPy array, which keeps the memory's owner alive."""

    def __init__(self, memory: Memory, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
        }


class Memory:
    """A piece of host memory owned by a pool.

    Attributes:
        bytes: all bytes, from an aligned address.
        address: the address of the first byte.
        nbytes: the number of bytes.
        elements: all bytes as an array of the dtype that was last used.
    """

    __slots__ = ("_exported", "address", "bytes", "elements", "nbytes")

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + START, np.uint8)
        begin: int = raw.__array_interface__["data"][0]
        self.address = -(-begin // START) * START
        self.bytes = raw[self.address - begin :][:nbytes]
        self.nbytes = nbytes
        self.elements = self.bytes
        self._exported: Callable[[], np.ndarray | None] = lambda: None

    def export(self, owner: object) -> np.ndarray:
        """Returns all bytes as an array that keeps ``owner`` alive; reused while it lives."""
        array = self._exported()
        if array is None:
            array = np.asarray(_ArrayInterface(self, owner))
            self._exported = ref(array)
        return array

    def as_dtype(self, dtype: np.dtype) -> np.ndarray:
        """Returns all bytes as an array of ``dtype``."""
        elements = self.elements
        if elements.dtype is not dtype:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            self.elements = elements = self.bytes[:whole].view(dtype)
        return elements


class SimPool:
    """A memory pool with free lists by size, and counters for tests.

    A request takes a free block of its size, rounded up to granules. Free memory is returned to the
    system when it exceeds twice the most that was ever in use. A signal handler may use the pool
    during a call, and may end the call by an exception.

    Attributes:
        live_bytes: the bytes in use.
        free_bytes: the free bytes that the pool keeps.
        grown: how often memory was requested from the system.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}
        self._lock = threading.RLock()
        self._peak_bytes = 0
        self.live_bytes = 0
        self.free_bytes = 0
        self.grown = 0

    def allocate(self, nbytes: int) -> Memory:
        """Allocates at least ``nbytes``."""
        size = -(-nbytes // GRANULE) * GRANULE or GRANULE
        with self._lock:
            free = self._free.get(size)
            if free:
                self.free_bytes -= size
                memory = free.pop()
            else:
                if self.free_bytes > 2 * self._peak_bytes:  # the sizes of requests have changed
                    self.clear()
                memory = Memory(size)
                self.grown += 1
            self.live_bytes += memory.nbytes
            self._peak_bytes = max(self._peak_bytes, self.live_bytes)
        return memory

    def release(self, memory: Memory) -> None:
        """Returns memory to the pool."""
        size = memory.nbytes
        with self._lock:
            self.live_bytes -= size
            self.free_bytes += size
            self._free.setdefault(size, []).append(memory)

    def clear(self) -> None:
        """Returns all free memory to the system."""
        with self._lock:
            self._free.clear()
            self.free_bytes = 0
