"""Where the pointer table of a launch is on a GPU: by value, or in a cached device table.

A table that fits goes with the launch, by value. A larger one is uploaded once and found again by
its words, so that a training step whose addresses do not change uploads nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .memory import Buffer, Queue, Row
from .table import CHUNK_SIZE, INLINE_WORDS, pack_table, row_words

if TYPE_CHECKING:
    from .cuda import CudaDevice

__all__ = ["Tables"]

CACHED = 128  # tables; a training step needs a handful
SMALLEST_CHUNK = 1024  # elements: one float32 vector for each of 256 threads


class Tables:
    """The tables of one device.

    Args:
        max_blocks: how many blocks a launch has at most; small work is cut finer to feed them.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        # words -> (packed table, number of chunks, device words or None)
        self._cache: OrderedDict[tuple[int, ...], tuple[np.ndarray, int, Buffer | None]]
        self._cache = OrderedDict()

    def table(
        self, device: CudaDevice, rows: Sequence[Row], items: Sequence[int], queue: Queue
    ) -> tuple[np.ndarray, int]:
        """The struct that a kernel takes by value, and the number of chunks in it.

        Args:
            device: whose table it is; it uploads a large one.
            rows: the operands of each row.
            items: of each row, the items of work.
            queue: which of the device's queues launches.
        """
        chunk_size = self._chunk_size(sum(items))
        words, num_chunks = row_words(rows, items, chunk_size)
        key = (chunk_size, len(rows), *words)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is None:
            found = self._made(device, words, len(rows), num_chunks, chunk_size)
            with self._lock:
                self._cache[key] = found
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        table, num_chunks, held = found
        if held is not None and queue != "compute":
            held.block.touched.add((device, queue))
            device.wait(device.mark("compute"), queue=queue)
        return table, num_chunks

    def _made(
        self, device: CudaDevice, words: list[int], num_rows: int, num_chunks: int, chunk_size: int
    ) -> tuple[np.ndarray, int, Buffer | None]:
        packed = np.array(words, np.int64)
        held = None if len(words) <= INLINE_WORDS else device.upload(packed)
        address = 0 if held is None else held.address
        table = pack_table(packed, num_rows, num_chunks, address=address, chunk_size=chunk_size)
        return table, num_chunks, held

    def _chunk_size(self, size: int) -> int:
        """A power of two that gives every block a chunk, if there is that much work."""
        chunk = CHUNK_SIZE
        while chunk > SMALLEST_CHUNK and size // chunk < self._max_blocks:
            chunk //= 2
        return chunk
