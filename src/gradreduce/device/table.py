"""How the rows of a launch reach a kernel: the words of its pointer table; never launches.

One launch serves many tensors, so its arguments are a table. Row t holds the operands of tensor
t, and the work is cut into chunks of ``chunk_size`` items numbered through all rows. An item is an
element of the first operand, unless the kernel says otherwise (``Kernel.items``):

    words of a row:  first chunk │ items │ elements of the last operand │ address, address, …

A block takes a chunk, finds its row by binary search over the first words (all threads of a block
search alike, so nothing diverges), and so one huge and many tiny tensors share the blocks evenly.
``elements of the last operand`` differs from ``items`` only where a kernel pads (pack) or is not
elementwise (segment_sum).

The struct below is ``Table`` in ``kernels/common.cuh``, byte for byte; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .memory import Row

__all__ = ["CHUNK_SIZE", "INLINE_WORDS", "ROW_HEADER", "TABLE", "pack_table", "row_words"]

# Kernel parameters are limited to 4 KiB before CUDA 12.1 and sm_70; this leaves 400 bytes for
# the table's head and the scalars. 448 words are 89 rows of two operands.
INLINE_WORDS = 448
ROW_HEADER = 3
# Items. A multiple of every vector's lanes, and enough work for a block of 256 threads to
# make 4 to 16 vector loads each.
CHUNK_SIZE = 16_384

TABLE = np.dtype(
    [
        ("words", np.int64),  # address of the words, or 0: they are inline
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
    rows: Sequence[Row], items: Sequence[int], chunk_size: int = CHUNK_SIZE
) -> tuple[list[int], int]:
    """The words of all rows, and the number of chunks they make.

    Args:
        rows: the operands of each row.
        items: of each row, not zero; ``Kernel.num_items`` says how many.
        chunk_size: items of a chunk.
    """
    words: list[int] = []
    chunk = 0
    for row, num_items in zip(rows, items, strict=True):
        words += (chunk, num_items, row[-1].size)
        words += [operand.address for operand in row]
        chunk += -(-num_items // chunk_size)
    return words, chunk


def pack_table(
    words: np.ndarray, num_rows: int, num_chunks: int, *, address: int, chunk_size: int = CHUNK_SIZE
) -> np.ndarray:
    """The struct that a kernel takes by value, as an array of one element.

    Args:
        words: int64, ``(num_rows * row_words,)``.
        num_rows: rows in it.
        num_chunks: chunks in it.
        address: where the device sees the words; 0 puts them inline, where they must fit.
        chunk_size: items of a chunk.
    """
    table = np.zeros(1, TABLE)
    head = table[0]
    head["words"] = address
    head["num_rows"] = num_rows
    head["row_words"] = len(words) // num_rows
    head["end_chunk"] = num_chunks
    head["chunk_size"] = chunk_size
    if not address:
        head["inline_words"][: len(words)] = words
    return table
