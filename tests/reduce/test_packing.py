"""Plans: which tensors are packed together, and which device adds which slice of a pack."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import examples

from gradreduce.device import as_dtype
from gradreduce.reduce.hierarchical_copy import SLICE_BYTES, Slice, plan_slices
from gradreduce.reduce.packing import FlatPlan, plan_packing

LAWS = settings(deadline=None, max_examples=examples(150))
FLOAT32, FLOAT64 = as_dtype("float32"), as_dtype("float64")
PAIRS = [(dtype, dtype) for dtype in map(as_dtype, ("float32", "float16", "float64", "complex128"))]
# A sum of float16 in its accumulate type, and the result.
PAIRS += [(FLOAT32, as_dtype(half)) for half in ("float16", "bfloat16")]


def batches(max_size: int = 40):
    """(sizes, dtypes) of a batch."""
    tensor = st.tuples(st.integers(0, max_size), st.sampled_from(PAIRS))
    return st.lists(tensor, max_size=12).map(
        lambda tensors: (tuple(t[0] for t in tensors), tuple(t[1] for t in tensors))
    )


def narrower(plan: FlatPlan) -> int:
    return min(plan.dtype.itemsize, plan.out_dtype.itemsize)


def units(plan: FlatPlan) -> int:
    """The number of 16-byte ranges (in the narrower dtype) to distribute."""
    return -(-plan.layout.size * narrower(plan) // 16)


@LAWS
@given(batches(max_size=3000), st.integers(0, 30), st.integers(0, 64), st.integers(0, 4))
def test_every_tensor_is_in_one_plan_and_the_packs_cover_it(batch, num_packs, limit, group):
    sizes, dtypes = batch
    plans = plan_packing(sizes, dtypes, num_packs, limit, group)
    assert sorted(tensor for plan in plans for tensor in plan.tensors) == list(range(len(sizes)))
    for plan in plans:
        assert list(plan.tensors) == sorted(plan.tensors)
        assert {dtypes[tensor] for tensor in plan.tensors} == {(plan.dtype, plan.out_dtype)}
        end = 0  # tensors lie end to end at vector boundaries
        for tensor, offset, span in zip(
            plan.tensors, plan.layout.offsets, plan.layout.spans, strict=True
        ):
            assert offset == end
            assert offset * plan.dtype.itemsize % 16 == offset * plan.out_dtype.itemsize % 16 == 0
            gap = span - sizes[tensor]
            assert 0 <= gap * narrower(plan) < 16
            assert plan.together or gap == 0
            end = offset + span
        edges = [0, *(stop for _, stop in plan.packs)]
        assert plan.packs == tuple(pairwise(edges))
        assert edges[-1] == plan.layout.size == end
        assert all(start < stop for start, stop in plan.packs)
        assert len(plan.packs) == min(max(1, num_packs), units(plan))
        nbytes = [(stop - start) * narrower(plan) for start, stop in plan.packs]
        assert not nbytes or max(nbytes) - min(nbytes) <= 16  # and cut at vector boundaries
        for start in edges[:-1]:
            assert start * plan.dtype.itemsize % 16 == start * plan.out_dtype.itemsize % 16 == 0


@LAWS
@given(batches(), st.integers(1, 20), st.integers(0, 1000), st.integers(0, 20))
def test_packs_make_one_flat_buffer_of_each_dtype_whatever_is_small(batch, num_packs, limit, group):
    plans = plan_packing(*batch, num_packs, limit, group)
    assert plans == plan_packing(*batch, num_packs, 0, 0)
    assert len(plans) == len(set(batch[1]))
    assert all(plan.together for plan in plans)


@LAWS
@given(batches(), st.integers(0, 1000), st.integers(0, 20))
def test_without_packs_and_limits_no_tensors_are_packed_together(batch, limit, group):
    for settings_of_one in ((0, 0), (limit, 0), (0, group)):
        plans = plan_packing(*batch, 0, *settings_of_one)
        assert len(plans) == len(batch[0])
        assert not any(plan.together for plan in plans)


@LAWS
@given(batches(), st.integers(1, 200), st.integers(1, 5))
def test_small_tensors_are_grouped_by_dtype_in_batch_order(batch, limit, group):
    sizes, dtypes = batch
    plans = plan_packing(sizes, dtypes, 0, limit, group)
    for pair in set(dtypes):
        small = [
            tensor
            for tensor, size in enumerate(sizes)
            if dtypes[tensor] == pair and 0 < size * pair[0].itemsize <= limit
        ]
        wanted = [tuple(small[start : start + group]) for start in range(0, len(small), group)]
        found = [plan for plan in plans if set(plan.tensors) & set(small)]
        assert [plan.tensors for plan in found] == wanted
        assert [plan.together for plan in found] == [len(tensors) > 1 for tensors in wanted]
    for plan in plans:
        assert plan.together == (len(plan.tensors) > 1)


def test_the_small_limit_is_inclusive():
    def tensors_of(small_max_bytes):
        pairs = ((FLOAT32, FLOAT32),) * 3
        return [plan.tensors for plan in plan_packing((4, 4, 5), pairs, 0, small_max_bytes, 10)]

    assert tensors_of(16) == [(0, 1), (2,)]
    assert tensors_of(15) == [(0,), (1,), (2,)]
    assert tensors_of(20) == [(0, 1, 2)]


def test_the_bytes_of_a_small_tensor_are_those_of_its_gradient():
    """The mean of integers is a float; the bytes are the gradient's, also if it is empty."""
    pairs = ((as_dtype("int8"), FLOAT32),) * 4
    assert [plan.tensors for plan in plan_packing((1, 2, 1, 0), pairs, 0, 1, 10)] == [
        (0, 2), (1,), (3,),
    ]  # fmt: skip


def test_integers_are_transferred_in_their_own_dtype():
    pairs = ((as_dtype("int32"), FLOAT64), (FLOAT64, FLOAT32))
    plans = plan_packing((8, 8), pairs, 1, 0, 0, as_dtype("float16"))
    assert [plan.wire.name for plan in plans] == ["int32", "float16"]


# -- plans of slices -------------------------------------------------------------------------------


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
