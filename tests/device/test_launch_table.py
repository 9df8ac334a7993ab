"""The cache of pointer tables, without a device: which are reused, and which dropped."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from gradreduce.device.run import table as tables
from gradreduce.device.run.table import INLINE_WORDS, ROW_HEADER

INLINE_ROWS = INLINE_WORDS // (ROW_HEADER + 1)


@pytest.fixture
def placed():
    return []


@pytest.fixture
def cache(placed):
    def place(words):
        placed.append(words)
        return 4096, placed[-1]

    return tables.Tables(place)


def rows_of(num_rows, *, size=20, address=64):
    """Rows of one operand each."""
    return [[SimpleNamespace(size=size, address=address + 64 * row)] for row in range(num_rows)]


def find(cache, rows, *, items=None, chunk_size=8):
    return cache.find(rows, [row[0].size for row in rows] if items is None else items, chunk_size)


@pytest.mark.parametrize("num_rows", [1, INLINE_ROWS, INLINE_ROWS + 1, 300])
def test_the_same_rows_are_one_table(cache, placed, num_rows):
    """Words that are not inline come with their map."""
    first = find(cache, rows_of(num_rows))
    assert find(cache, rows_of(num_rows)) is first
    assert first.num_chunks == 3 * num_rows
    assert len(placed) == (num_rows > INLINE_ROWS)
    for words in placed:
        assert first.held is words
        assert first.struct[0]["words"] == 4096
        assert len(words) == num_rows * (ROW_HEADER + 1) + 3 * num_rows
        assert words[-3 * num_rows :].tolist() == [row for row in range(num_rows) for _ in range(3)]


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": rows_of(3, address=128)},
        {"rows": rows_of(3, size=21)},
        {"rows": rows_of(3)[:2]},
        {"rows": rows_of(3)[::-1]},
        {"rows": [[operand for row in rows_of(3) for operand in row]], "items": [20]},
        {"rows": rows_of(3), "items": [20, 20, 19]},
        {"rows": rows_of(3), "chunk_size": 16},
    ],
)
def test_any_difference_makes_another_table(cache, changed):
    first = find(cache, rows_of(3))
    other = find(cache, **changed)
    assert other is not first
    assert other.struct.tobytes() != first.struct.tobytes()


def test_all_tables_are_dropped_when_they_are_too_large(cache, monkeypatch):
    monkeypatch.setattr(tables, "CACHED_WORDS", 2 * INLINE_WORDS)
    monkeypatch.setattr(tables, "CACHED_TABLES", 1)
    made = [find(cache, rows_of(1, address=64 * (1 + place))) for place in range(2)]
    assert find(cache, rows_of(1, address=64)) is made[0]
    large = find(cache, rows_of(2000))  # larger than the limit of the cache: it is kept alone
    assert find(cache, rows_of(2000)) is large
    assert find(cache, rows_of(1, address=64)) is not made[0]
    assert find(cache, rows_of(2000)) is not large


def test_a_few_tables_are_kept_however_large_they_are(cache, placed, monkeypatch):
    monkeypatch.setattr(tables, "CACHED_WORDS", 1000)
    sizes = range(2000, 2000 + tables.CACHED_TABLES)
    for _ in range(3):
        for num_rows in sizes:
            find(cache, rows_of(num_rows))
    assert len(placed) == len(sizes)


def test_any_thread_may_ask(cache):
    barrier = threading.Barrier(4)

    def ask(_: int) -> list:
        barrier.wait(10)
        return [find(cache, rows_of(3, size=size)).struct[0]["inline_words"][1]
                for size in range(1, 50)]  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(ask, range(4), timeout=20):
            assert found == list(range(1, 50))
