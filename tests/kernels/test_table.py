"""The words of a pointer table: pure, no device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreduce.device.table import (
    CHUNK_SIZE,
    INLINE_WORDS,
    ROW_HEADER,
    TABLE,
    pack_table,
    row_words,
)


def row(*sizes, address=4096):
    return [SimpleNamespace(size=size, address=address + place) for place, size in enumerate(sizes)]


def test_a_row_is_first_chunk_sizes_and_addresses():
    words, num_chunks = row_words([row(5, 3), row(16, 16, address=64)], [5, 16], chunk_size=4)
    assert words == [0, 5, 3, 4096, 4097, 2, 16, 16, 64, 65]
    assert num_chunks == 2 + 4


def test_the_items_need_not_be_the_elements_of_an_operand():
    words, num_chunks = row_words([row(100, 3), row(7, 2)], [9, 1], chunk_size=4)
    assert words == [0, 9, 3, 4096, 4097, 3, 1, 2, 4096, 4097]
    assert num_chunks == 4


def test_no_rows_make_no_chunks():
    assert row_words([], []) == ([], 0)


def test_every_row_has_its_items():
    with pytest.raises(ValueError, match="zip"):
        row_words([row(5, 5)], [])


@pytest.mark.parametrize(
    ("size", "num_chunks"), [(1, 1), (CHUNK_SIZE, 1), (CHUNK_SIZE + 1, 2), (3 * CHUNK_SIZE, 3)]
)
def test_the_last_chunk_of_a_row_may_be_short(size, num_chunks):
    assert row_words([row(size, size)], [size])[1] == num_chunks


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 40))
def test_every_element_is_in_one_chunk_of_one_row(sizes, chunk_size):
    words, num_chunks = row_words([row(size, size) for size in sizes], sizes, chunk_size)
    firsts = words[:: ROW_HEADER + 2]
    seen = []
    for chunk in range(num_chunks):
        found = int(np.searchsorted(firsts, chunk, side="right")) - 1
        begin = (chunk - firsts[found]) * chunk_size
        end = min(begin + chunk_size, sizes[found])
        assert begin < end
        seen += [(found, element) for element in range(begin, end)]
    assert seen == [(found, element) for found, size in enumerate(sizes) for element in range(size)]


def test_a_chunk_is_whole_vectors_of_every_element():
    assert CHUNK_SIZE % 16 == 0


def test_words_that_fit_are_inline():
    words = np.arange(INLINE_WORDS, dtype=np.int64)
    table = pack_table(words, 64, 1000, address=0)
    assert (table.dtype, table.shape) == (TABLE, (1,))
    head = table[0]
    assert head["words"] == 0
    assert (head["num_rows"], head["row_words"]) == (64, 7)
    assert (head["first_chunk"], head["end_chunk"], head["chunk_size"]) == (0, 1000, CHUNK_SIZE)
    assert head["inline_words"].tolist() == words.tolist()


def test_words_that_lie_elsewhere_are_not():
    words = np.arange(1, 1001, dtype=np.int64)
    head = pack_table(words, 200, 300, address=4096, chunk_size=8)[0]
    assert (head["words"], head["num_rows"], head["row_words"]) == (4096, 200, 5)
    assert (head["end_chunk"], head["chunk_size"]) == (300, 8)
    assert not head["inline_words"].any()


def test_too_many_words_do_not_fit_inline():
    with pytest.raises(ValueError, match="broadcast"):
        pack_table(np.zeros(INLINE_WORDS + 1, np.int64), 1, 1, address=0)


def test_a_launch_fits_into_the_parameters_of_every_architecture():
    """4 KiB, with room for the scalars."""
    assert TABLE.itemsize + 8 * 8 <= 4096
