"""The pointer tables that a device has made: found again by what is in them; never launches.

A training step whose addresses do not change makes no table and uploads none.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .memory import Row
from .table import INLINE_WORDS, row_map, row_words, struct

__all__ = ["Table", "Tables"]

CACHED_WORDS = 1 << 20  # 8 MiB of host memory, and at most as much on the device


class Table(NamedTuple):
    """What a launch needs of its table.

    Attributes:
        struct: what the kernel takes by value; never written.
        num_chunks: how many there are.
        held: what keeps the words that are not inline; None if they are.
        address: of the struct, in host memory.
    """

    struct: np.ndarray
    num_chunks: int
    held: Any
    address: int


class Tables:
    """The tables of one device; any thread may ask.

    Args:
        place: puts words where the device sees them: their address, and what keeps them.
    """

    def __init__(self, place: Callable[[np.ndarray], tuple[int, Any]]) -> None:
        self._place = place
        self._lock = threading.RLock()
        self._made: OrderedDict[tuple[int, int, bytes], Table] = OrderedDict()
        self._num_words = 0

    def find(self, rows: Sequence[Row], items: Sequence[int], chunk_size: int) -> Table:
        """The table of these rows; made if it is not there.

        Args:
            rows: the operands of each row, at least one row.
            items: of each row, the items of work; not zero.
            chunk_size: items of a chunk.
        """
        sizes = [row[-1].size for row in rows]
        addresses = [operand.address for row in rows for operand in row]
        looked = array("q", [*items, *sizes, *addresses])
        key = (chunk_size, len(rows), looked.tobytes())
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                if key in self._made:  # a signal handler, which may run in between, may drop it
                    self._made.move_to_end(key)
                return found
        found = self._make(np.frombuffer(looked, np.int64), len(rows), chunk_size)
        num_words = _words_of(key)
        with self._lock:
            if self._made.setdefault(key, found) is found:
                self._num_words += num_words
            while self._num_words > CACHED_WORDS and len(self._made) > 1:
                dropped, _ = self._made.popitem(last=False)
                num_words = _words_of(dropped)
                self._num_words -= num_words
        return found

    def _make(self, looked: np.ndarray, num_rows: int, chunk_size: int) -> Table:
        items, last_sizes = looked[:num_rows], looked[num_rows : 2 * num_rows]
        addresses = looked[2 * num_rows :].reshape(num_rows, -1)
        words, num_chunks = row_words(items, last_sizes, addresses, chunk_size)
        address, held = 0, None
        if words.size > INLINE_WORDS:
            address, held = self._place(np.append(words, row_map(words, num_chunks)))
        made = struct(words, num_chunks, address=address, chunk_size=chunk_size)
        return Table(made, num_chunks, held, made.ctypes.data)


def _words_of(key: tuple[int, int, bytes]) -> int:
    """About as many words as the table of this key is; every one has its struct."""
    return INLINE_WORDS + len(key[2]) // 8
