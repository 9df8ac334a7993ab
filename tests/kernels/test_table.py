"""The words of a pointer table: pure, no device."""

import numpy as np
import pytest

from gradreduce.device.run.table import (
    CHUNK_SIZE,
    INLINE_WORDS,
    ROW_HEADER,
    TABLE,
    row_map,
    row_words,
    struct,
)


def words_of(items, last_sizes=None, addresses=None, **options):
    """Rows of two operands, by default aligned and of the size of their items."""
    last_sizes = items if last_sizes is None else last_sizes
    addresses = [[4096, 8192]] * len(items) if addresses is None else addresses
    parts = [np.array(part, np.int64) for part in (items, last_sizes, addresses)]
    return row_words(parts[0], parts[1], parts[2].reshape(len(items), 2), **options)


def test_a_row_is_first_chunk_sizes_alignment_and_addresses():
    words, num_chunks = words_of([5, 16], [3, 16], [[4096, 4112], [64, 65]], chunk_size=4)
    assert words.tolist() == [[0, 5, 3, 1, 4096, 4112], [2, 16, 16, 0, 64, 65]]
    assert (words.dtype, num_chunks) == (np.int64, 2 + 4)
    mapped = row_map(words, num_chunks)
    assert (mapped.dtype, mapped.tolist()) == (np.int64, [0, 0, 1, 1, 1, 1])
    words, num_chunks = words_of([])
    assert (words.shape, num_chunks) == ((0, ROW_HEADER + 2), 0)
    sizes = (1, CHUNK_SIZE, CHUNK_SIZE + 1, 2**40)
    assert [words_of([size])[1] for size in sizes] == [1, 1, 2, 2**26]
    assert CHUNK_SIZE % 16 == 0, "a chunk is whole vectors of every element"


@pytest.mark.parametrize("off", [1, 2, 4, 8, 15])
@pytest.mark.parametrize("operand", [0, 1])
def test_one_misaligned_operand_is_enough(off, operand):
    addresses = [[1 << 40, 4096], [1 << 40, 4096]]
    addresses[1][operand] += off
    assert words_of([1, 1], addresses=addresses)[0][:, 3].tolist() == [1, 0]


def test_words_that_fit_are_inline_and_others_are_not():
    words = np.arange(1, 1 + INLINE_WORDS, dtype=np.int64).reshape(64, 7)
    for address, inline in ((0, words.ravel().tolist()), (4096, [0] * INLINE_WORDS)):
        table = struct(words, 1000, address=address, chunk_size=8)
        assert (table.dtype, table.shape) == (TABLE, (1,))
        *head, found = table[0].tolist()
        assert dict(zip(TABLE.names, head, strict=False)) == {
            "words": address, "num_rows": 64, "row_words": 7, "first_chunk": 0, "end_chunk": 1000,
            "chunk_size": 8,
        }  # fmt: skip
        assert list(found) == inline
    assert struct(words, 1000, address=0)["chunk_size"] == CHUNK_SIZE
    with pytest.raises(ValueError, match="broadcast"):
        struct(np.zeros((1, INLINE_WORDS + 1), np.int64), 1, address=0)
    assert TABLE.itemsize + 8 * 8 <= 4096, "a launch has parameters of 4 KiB, with its scalars"
