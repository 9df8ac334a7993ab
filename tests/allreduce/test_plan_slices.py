"""Which device adds which part of a pack, as a pure plan."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gradreduce.allreduce.hierarchical import SLICE_BYTES, Slice, plan_slices

LAWS = settings(deadline=None, max_examples=200)
SMALL = 256  # stands for SLICE_BYTES, so that small sizes lie on both sides of it

PACKS = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([1, 2, 4, 8, 16])), max_size=10)
MAINS = st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True).map(sorted)


def of_job(slices, job):
    return [part for part in slices if part.job == job]


@LAWS
@given(PACKS, MAINS)
def test_slices_cover_every_pack_in_order_and_none_is_empty(packs, mains):
    slices = plan_slices(packs, mains, SMALL)
    assert [part.job for part in slices] == sorted(part.job for part in slices)
    for job, (size, _) in enumerate(packs):
        edges = [0, *(part.stop for part in of_job(slices, job))]
        assert [(part.start, part.stop) for part in of_job(slices, job)] == list(pairwise(edges))
        assert edges[-1] == size
        assert all(part.start < part.stop for part in of_job(slices, job))


@LAWS
@given(PACKS, MAINS)
def test_a_large_pack_has_one_slice_for_each_physical_device(packs, mains):
    slices = plan_slices(packs, mains, SMALL)
    for job, (size, itemsize) in enumerate(packs):
        large = size * itemsize >= SMALL
        found = [part.main for part in of_job(slices, job)]
        assert found == mains if large and len(mains) > 1 else len(found) == 1


@LAWS
@given(PACKS, MAINS)
def test_slices_are_cut_at_sixteen_bytes_and_are_equal_to_within_them(packs, mains):
    slices = plan_slices(packs, mains, SMALL)
    for job, (_, itemsize) in enumerate(packs):
        assert all(part.start * itemsize % 16 == 0 for part in of_job(slices, job))
        nbytes = [(part.stop - part.start) * itemsize for part in of_job(slices, job)]
        assert max(nbytes[:-1], default=nbytes[-1]) - min(nbytes[:-1], default=nbytes[-1]) <= 16
        assert abs(nbytes[-1] - nbytes[0]) < 32  # the last one also has what is no whole unit


@LAWS
@given(PACKS, MAINS)
def test_small_packs_take_turns(packs, mains):
    slices = plan_slices(packs, mains, SMALL)
    small = [
        part.main
        for job, (size, itemsize) in enumerate(packs)
        for part in of_job(slices, job)
        if size * itemsize < SMALL
    ]
    assert small == [mains[turn % len(mains)] for turn in range(len(small))]


def test_the_limit_is_inclusive():
    assert SLICE_BYTES == 64 * 1024
    assert plan_slices([(16_383, 4)], [0, 2]) == [Slice(0, 0, 0, 16_383)]
    assert plan_slices([(16_384, 4)], [0, 2]) == [Slice(0, 0, 0, 8192), Slice(0, 2, 8192, 16_384)]


def test_large_packs_do_not_use_up_a_turn():
    packs = [(1, 4), (70_000, 1), (1, 4), (1, 4)]
    slices = plan_slices(packs, [0, 1, 3])
    assert [(part.job, part.main) for part in slices] == [
        (0, 0), (1, 0), (1, 1), (1, 3), (2, 1), (3, 3),
    ]  # fmt: skip


def test_the_last_slice_takes_the_odd_elements():
    slices = plan_slices([(65_541, 1)], [0, 1, 2])
    assert [(part.start, part.stop) for part in slices] == [
        (0, 21_840), (21_840, 43_680), (43_680, 65_541),
    ]  # fmt: skip


def test_one_physical_device_needs_no_slices():
    assert plan_slices([(10**6, 4), (3, 4)], [0]) == [Slice(0, 0, 0, 10**6), Slice(1, 0, 0, 3)]


def test_nothing_to_reduce():
    assert plan_slices([], [0, 1]) == []
