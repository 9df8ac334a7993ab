"""The rows of a growing sparse sum, compared with a dictionary and with a loop of takes."""

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradreduce.ops import RowIndex, merge_row_index
from gradreduce.ops.row_index import MAX_TOUCHES

ROWS = st.lists(st.integers(0, 12), unique=True, max_size=8).map(sorted)
WEIGHTS = st.sampled_from([1, 2, 3, 512, 0.5, 0.1, 1 / 3, 2.0**-60, 2.0**53, 1e300])


class Model:
    """A dictionary from index to row number and number of gradients that touched the row."""

    def __init__(self):
        self.places, self.counts = {}, {}

    def touch(self, indices):
        into = []
        for index in indices:
            there = index in self.places
            place = self.places.setdefault(index, len(self.places))
            self.counts[index] = self.counts.get(index, 0) + 1
            into.append(~place if there else place)
        return into


def grown(gradients):
    slots, model = RowIndex.none(), Model()
    for indices in gradients:
        before = slots
        slots, into = slots.add_gradient(np.array(indices, np.int64))
        assert into.dtype == np.int64
        assert before is not slots
        assert into.tolist() == model.touch(indices)
    return slots, model


@settings(max_examples=60, deadline=None)
@given(gradients=st.lists(ROWS, max_size=12))
def test_rows_lie_in_the_order_in_which_they_came(gradients):
    slots, model = grown(gradients)
    assert slots.num_rows == len(model.places)
    assert slots.indices.tolist() == sorted(model.places)
    assert slots.rows.tolist() == [model.places[index] for index in sorted(model.places)]
    assert slots.num_touches().tolist() == [model.counts[index] for index in sorted(model.counts)]


@settings(max_examples=60, deadline=None)
@given(sums=st.lists(st.lists(ROWS, max_size=4), min_size=1, max_size=4), mean=st.booleans())
def test_sums_are_merged_in_their_order(sums, mean):
    made = [grown(gradients) for gradients in sums]
    segments, by = merge_row_index([slots for slots, _ in made], mean=mean)
    starts = np.cumsum([0, *(slots.num_rows for slots, _ in made)]).tolist()
    indices = sorted(set().union(*(model.places for _, model in made)))
    assert segments.indices.tolist() == indices
    for place, index in enumerate(indices):
        rows = segments.order[segments.bounds[place] : segments.bounds[place + 1]].tolist()
        assert rows == [
            start + model.places[index]
            for start, (_, model) in zip(starts, made, strict=False)
            if index in model.places
        ]
        count = sum(model.counts.get(index, 0) for _, model in made)
        assert (by if isinstance(by, float) else by[place]) == (count if mean else 1)


@settings(max_examples=60, deadline=None)
@given(
    sums=st.lists(st.lists(st.tuples(ROWS, WEIGHTS), max_size=4), min_size=1), saved=st.booleans()
)
def test_divisors_are_exact_sums_of_weights_that_are_rounded_once(sums, saved):
    made, exact = [], Counter()
    for gradients in sums:
        slots = RowIndex.none()
        for indices, weight in gradients:
            slots, _ = slots.add_gradient(np.array(indices, np.int64), weight)
            exact.update(dict.fromkeys(indices, Fraction(weight)))
        if saved:
            slots = RowIndex.of(slots.indices, slots.num_touches(), slots.weights_to_save())
        made.append(slots)
    segments, by = merge_row_index(made, mean=True)
    wanted = [float(exact[index]) for index in segments.indices.tolist()]
    assert np.broadcast_to(by, len(wanted)).tolist() == wanted


def test_counts_are_those_of_every_touch_however_many():
    """Counts are computed from time to time: tested before, at and after that time."""
    for num_gradients in (1, MAX_TOUCHES, MAX_TOUCHES + 1, MAX_TOUCHES + 2, 3 * MAX_TOUCHES):
        slots, model = grown([[k % 5, 5 + k % 7] for k in range(num_gradients)])
        counts = [model.counts[index] for index in sorted(model.counts)]
        assert slots.num_touches().tolist() == counts
        assert len(slots.touches) <= MAX_TOUCHES


def test_slots_stay_as_they_are():
    """If a call fails after its plan was made, the next one must find the old slots."""
    slots, _ = grown([[1, 4], [4, 6]])
    kept = [slots.indices.tolist(), slots.rows.tolist(), slots.num_touches().tolist()]
    slots.add_gradient(np.array([0, 4, 9]))
    assert [slots.indices.tolist(), slots.rows.tolist(), slots.num_touches().tolist()] == kept


def test_equal_counts_are_one_number():
    """One number needs no upload."""
    slots, _ = grown([[1, 4], [1, 4], [1, 4]])
    assert merge_row_index([slots], mean=True)[1] == 3.0
    assert merge_row_index([slots], mean=False)[1] == 1.0
