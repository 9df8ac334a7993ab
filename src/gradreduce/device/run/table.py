"""Pointer tables that pass the rows of a launch to a kernel, and their cache.

One launch serves many tensors, so its arguments are a table. Row t holds the operands of tensor t,
and the work is cut into chunks of ``chunk_size`` items numbered through all rows. An item is an
element of the first operand, unless the kernel says otherwise (``Kernel.items``):

    words of a row:  first chunk │ items │ elements of the last operand │ aligned │ address, …

A block takes a chunk and finds its row. In a small table, which is passed by value, it searches the
first words (all threads of a block take the same steps, so they do not diverge). In a table in
device memory a search would be a chain of dependent loads; there the block reads one word of the
map behind the rows, which holds the row of every chunk. Huge and tiny tensors thus share the blocks
evenly. ``elements of the last operand`` differs from ``items`` only if a kernel pads (pack) or is
not elementwise (segment_sum). ``aligned`` is 1 if every address is a multiple of the vector size,
else 0.

The struct below equals ``Table`` in ``kernels/common.cuh`` byte for byte; a test compares them. A
training step whose addresses do not change finds its tables in the cache and uploads nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from gradreduce.device.memory.buffer import ALIGNMENT, Row

# Before CUDA 12.1 and sm_70, kernel parameters take at most 4 KiB. 448 words (74 rows of two
# operands) leave 512 bytes for the head of the table and the scalars.
INLINE_WORDS = 448
ROW_HEADER = 4
# In items, for the simulation; a multiple of all vector lengths.
CHUNK_SIZE = 16_384

_ADDRESS = attrgetter("address")

TABLE = np.dtype(
    [
        ("words", np.int64),  # address of the rows and the map; 0: inline rows, no map
        ("num_rows", np.int64),
        ("row_words", np.int64),
        ("first_chunk", np.int64),
        ("end_chunk", np.int64),
        ("chunk_size", np.int64),
        ("inline_words", np.int64, INLINE_WORDS),
    ],
    align=True,
)


def row_words(
    items: np.ndarray, last_sizes: np.ndarray, addresses: np.ndarray, chunk_size: int = CHUNK_SIZE
) -> tuple[np.ndarray, int]:
    """Returns the words of all rows, ``(num_rows, row_words)``, and the number of chunks.

    Args:
        items: int64, ``(num_rows,)``: the items of each row, from ``Kernel.num_items``; not 0.
        last_sizes: int64, ``(num_rows,)``: the number of elements of each row's last operand.
        addresses: int64, ``(num_rows, num_operands)``.
        chunk_size: the number of items in a chunk.
    """
    words = np.empty((len(items), ROW_HEADER + addresses.shape[1]), np.int64)
    ends = np.cumsum(-(-items // chunk_size))
    words[:1, 0] = 0
    words[1:, 0] = ends[:-1]
    words[:, 1] = items
    words[:, 2] = last_sizes
    words[:, 3] = np.bitwise_or.reduce(addresses, axis=1) % ALIGNMENT == 0
    words[:, ROW_HEADER:] = addresses
    return words, int(ends[-1]) if len(ends) else 0


def row_map(words: np.ndarray, num_chunks: int) -> np.ndarray:
    """Returns the row of every chunk, int64, ``(num_chunks,)``, from ``row_words``."""
    chunks = np.diff(words[:, 0], append=num_chunks)
    return np.repeat(np.arange(len(words)), chunks)


def struct(
    words: np.ndarray, num_chunks: int, *, address: int, chunk_size: int = CHUNK_SIZE
) -> np.ndarray:
    """Returns the struct that a kernel takes by value, as an array of one element.

    Args:
        words: int64, ``(num_rows, row_words)``, at least one row.
        num_chunks: the number of chunks in the table.
        address: the device address of the words, followed by the map. 0: the words are inline, and
            must fit.
        chunk_size: the number of items in a chunk.
    """
    table = np.zeros(1, TABLE)
    head = table[0]
    head["words"] = address
    head["num_rows"], head["row_words"] = words.shape
    head["end_chunk"] = num_chunks
    head["chunk_size"] = chunk_size
    if not address:
        head["inline_words"][: words.size] = words.reshape(-1)
    return table


# 8 MiB of host memory, and at most as much on the device. A larger cache is emptied, but not while
# it has fewer tables than this: a step over 100,000 tensors needs a few large ones.
CACHED_WORDS, CACHED_TABLES = 1 << 20, 16


class Table(NamedTuple):
    """The parts of a pointer table that a launch needs.

    Attributes:
        struct: the struct that the kernel takes by value; never written.
        num_chunks: the number of chunks.
        held: keeps the memory of words that are not inline alive; None for inline words.
        argument: the struct as the backend passes it to a kernel.
    """

    struct: np.ndarray
    num_chunks: int
    held: Any
    argument: Any


class Tables:
    """The cached tables of one device; thread-safe.

    Args:
        upload: copies words to the device; returns their address and an object that keeps them
            alive.
        as_argument: makes the ``argument`` of a table from its struct. Default: its address.
    """

    def __init__(
        self,
        upload: Callable[[np.ndarray], tuple[int, Any]],
        as_argument: Callable[[np.ndarray], Any] = lambda struct: struct.ctypes.data,
    ) -> None:
        self._upload = upload
        self._as_argument = as_argument
        self._made: dict[tuple[int, int, bytes], Table] = {}
        self._num_words = 0

    def find(self, rows: Sequence[Row], items: Sequence[int], chunk_size: int) -> Table:
        """Returns the table of these rows from the cache, or makes it.

        Args:
            rows: the operands of each row; at least one row.
            items: the number of work items of each row; not 0.
            chunk_size: the number of items in a chunk.
        """
        sizes = [row[-1].size for row in rows]
        addresses = map(_ADDRESS, chain.from_iterable(rows))
        looked = array("q", [*items, *sizes, *addresses])
        key = (chunk_size, len(rows), looked.tobytes())
        table = self._made.get(key)
        if table is None:
            table = self._make(np.frombuffer(looked, np.int64), len(rows), chunk_size)
            # Most tables of a large cache have addresses that are no longer used.
            if self._num_words > CACHED_WORDS and len(self._made) >= CACHED_TABLES:
                self._made.clear()
                self._num_words = 0
            self._made[key] = table
            self._num_words += INLINE_WORDS + len(looked)
        return table

    def _make(self, looked: np.ndarray, num_rows: int, chunk_size: int) -> Table:
        items, last_sizes = looked[:num_rows], looked[num_rows : 2 * num_rows]
        addresses = looked[2 * num_rows :].reshape(num_rows, -1)
        words, num_chunks = row_words(items, last_sizes, addresses, chunk_size)
        address, held = 0, None
        if words.size > INLINE_WORDS:
            address, held = self._upload(np.append(words, row_map(words, num_chunks)))
        made = struct(words, num_chunks, address=address, chunk_size=chunk_size)
        return Table(made, num_chunks, held, self._as_argument(made))
