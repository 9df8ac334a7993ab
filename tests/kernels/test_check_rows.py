"""Rows are judged alike one by one and all at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreduce import ops
from gradreduce.backends import open_mesh
from gradreduce.ops import validate

SIZE = 8
INT32 = np.dtype("int32")
NUM_ROWS = 2 * validate.MANY


@pytest.fixture(scope="module")
def device():
    with open_mesh(1, backend="sim") as mesh:
        yield mesh.devices[0]


@pytest.fixture(scope="module")
def flat(device):
    """64 bytes more than three columns of rows need."""
    return device.zeros((3 * NUM_ROWS * SIZE + 16,), "float32")


def good_rows(flat, num_operands=3):
    return [
        [flat.view(SIZE * (NUM_ROWS * place + row), (SIZE,)) for place in range(num_operands)]
        for row in range(NUM_ROWS)
    ]


def judged(rows, num_written, **options):
    """What is wrong with them, or None."""
    try:
        validate.check_rows("add_n", rows, num_written, **options)
    except ValueError as error:
        return str(error)
    return None


def one_by_one(rows, num_written, **options):
    found = [judged([row], num_written, **options) for row in rows]
    return next((text for text in found if text), None)


def test_many_good_rows_are_looked_at_once(flat, monkeypatch):
    monkeypatch.setattr(validate, "_check_row", None)  # a call of it would fail
    for num_written in (1, 2, 3):
        validate.check_rows("add_n", good_rows(flat), num_written)
    aliased = [[term, other, term] for term, other, _ in good_rows(flat)]
    validate.check_rows("add_n", aliased, 1)
    padded = [[flat.view(0, (SIZE,)), flat.view(SIZE, (SIZE - 3,))]] * NUM_ROWS
    validate.check_rows("pack", padded, 1, padded=True)


FAULTS = {
    "too small": lambda flat: flat.view(0, (SIZE - 1,)),
    "too large": lambda flat: flat.view(0, (SIZE + 1,)),
    "another dtype": lambda flat: flat.view(0, (SIZE,), INT32),
    "overlaps the first": lambda flat: flat.view(SIZE * 5 + 1, (SIZE,)),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_row_among_many_is_found_with_its_own_words(flat, fault, place):
    rows = good_rows(flat)
    rows[5][place] = FAULTS[fault](flat)
    text = one_by_one(rows, 1)
    assert judged(rows, 1) == text
    # Its own out may be of another dtype (a cast), and lie beside what other rows read.
    harmless = place == 0 and fault in ("another dtype", "overlaps the first")
    assert (text is None) == harmless


views = st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 4, 5]), st.sampled_from("fi"))


@given(
    st.lists(st.tuples(views, views, views), min_size=validate.MANY, max_size=validate.MANY + 3),
    st.integers(1, 3),
)
def test_the_two_ways_agree(device, flat, places, num_written):
    dtypes = {"f": flat.dtype, "i": INT32}
    rows = [
        [flat.view(start, (size,), dtypes[kind]) for start, size, kind in row] for row in places
    ]
    assert (judged(rows, num_written) is None) == (one_by_one(rows, num_written) is None)


@given(st.lists(st.tuples(views, views), min_size=validate.MANY, max_size=validate.MANY + 3))
def test_the_two_ways_agree_on_padded_rows(device, flat, places):
    rows = [[flat.view(start, (size,)) for start, size, _ in row] for row in places]
    one = one_by_one(rows, 1, padded=True)
    assert (judged(rows, 1, padded=True) is None) == (one is None)


def test_nothing_of_many_is_launched_when_one_is_bad(device, flat):
    rows = good_rows(flat)
    rows[-1][1] = flat.view(0, (SIZE - 1,))
    with device.mesh.journal() as journal, pytest.raises(ValueError, match="sizes differ"):
        ops.add_n([row[0] for row in rows], [row[1:] for row in rows])
    assert journal.launches == 0
