"""How tensors lie in a flat buffer, when two overlap, and when a shape is what was wanted."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreduce.device import ALIGNMENT, compatible, flat_layout, overlap

sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**40)), max_size=30)


@given(sizes, st.sampled_from([1, 2, 4, 8, 16]))
def test_tensors_are_in_order_at_vector_boundaries_and_do_not_overlap(sizes, itemsize):
    """Which determines every offset."""
    layout = flat_layout(sizes, itemsize)
    assert len(layout.offsets) == len(layout.spans) == len(sizes)
    ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
    starts = [*layout.offsets, layout.size]
    assert starts[0] == 0
    assert all(start * itemsize % 16 == 0 for start in starts)
    for end, following in zip(ends, starts[1:], strict=True):
        assert 0 <= (following - end) * itemsize < ALIGNMENT == 16
    assert layout.spans == tuple(end - start for start, end in pairwise(starts))


def test_a_layout_by_hand():
    layout = flat_layout([5, 0, 4, 1], 4)
    assert (layout.offsets, layout.spans, layout.size) == ((0, 8, 8, 12), (8, 0, 4, 4), 16)
    layout = flat_layout([3, 2], 16)
    assert (layout.offsets, layout.spans, layout.size) == ((0, 3), (3, 2), 5)
    assert flat_layout([], 4).size == 0


@pytest.mark.parametrize(
    ("shape", "wanted", "fits"),
    [
        ((), (), True),
        ((2, 3), (2, 3), True),
        ((2, 3), (None, 3), True),
        ((2, 3), (None, None), True),
        ((0, 3), (None, 3), True),
        ((2, 3), [2, None], True),
        ((2, 3), (3, 2), False),
        ((2, 3), (2,), False),
        ((2,), (2, None), False),
        ((), (None,), False),
        ((2, 3), (None, 0), False),
        ((0,), (1,), False),
    ],
)
def test_compatible_shapes(shape, wanted, fits):
    assert compatible(shape, wanted) is fits


spans = st.tuples(st.integers(100, 112), st.integers(0, 8))


@given(spans, spans)
def test_buffers_overlap_if_they_share_a_byte(one, other):
    """An empty Buffer overlaps no other, at any address."""
    left, right = (SimpleNamespace(address=start, nbytes=size) for start, size in (one, other))
    shared = {*range(one[0], sum(one))} & {*range(other[0], sum(other))}
    assert overlap(left, right) == overlap(right, left) == bool(shared)
