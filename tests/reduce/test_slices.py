"""Plans of slices: which device adds which part of a pack."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import examples

from gradreduce.reduce.hierarchical_copy import SLICE_BYTES, Slice, plan_slices

LAWS = settings(deadline=None, max_examples=examples(200))
SMALL = 256  # instead of SLICE_BYTES, so that sizes below and above it are small

PACKS = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([1, 2, 4, 8, 16])), max_size=10)
MAINS = st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True).map(sorted)


def of_job(slices, job):
    return [part for part in slices if part.job == job]


@LAWS
@given(PACKS, MAINS)
def test_slices_cover_every_pack_and_every_device_adds_as_many_bytes(packs, mains):
    """Cuts are at 16 bytes; small packs are not cut, and rotate over the devices."""
    slices = plan_slices(packs, mains, SMALL)
    assert [part.job for part in slices] == sorted(part.job for part in slices)
    for job, (size, itemsize) in enumerate(packs):
        edges = [0, *(part.stop for part in of_job(slices, job))]
        assert [(part.start, part.stop) for part in of_job(slices, job)] == list(pairwise(edges))
        assert edges[-1] == size
        assert edges == sorted(set(edges))  # none is empty
        assert all(edge * itemsize % 16 == 0 for edge in edges[:-1])
    total = sum(size * itemsize for size, itemsize in packs)
    if total < SMALL:
        turns = [mains[turn % len(mains)] for turn in range(len(packs))]
        assert [part.main for part in slices] == turns
    elif len(mains) > 1:
        assert len(slices) <= len(packs) + len(mains) - 1
        found = dict.fromkeys(mains, 0)
        for part in slices:
            found[part.main] += (part.stop - part.start) * packs[part.job][1]
        assert all(abs(nbytes - total / len(mains)) < 32 for nbytes in found.values())
        order = [mains.index(part.main) for part in slices]
        assert order == sorted(order)


def test_the_limit_is_inclusive():
    assert SLICE_BYTES == 64 * 1024
    assert plan_slices([(16_383, 4)], [0, 2]) == [Slice(0, 0, 0, 16_383)]
    assert plan_slices([(16_384, 4)], [0, 2]) == [Slice(0, 0, 0, 8192), Slice(0, 2, 8192, 16_384)]
    assert plan_slices([(8192, 4)] * 2, [0, 2]) == [Slice(0, 0, 0, 8192), Slice(1, 2, 0, 8192)]
