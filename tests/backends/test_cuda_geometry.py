"""Grid and block sizes for several kinds of GPU, without a device or CuPy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradreduce.backends.cuda.geometry import VECTOR, WAVES, Geometry

H200 = {
    "WarpSize": 32,
    "MaxThreadsPerMultiProcessor": 2048,
    "MaxThreadsPerBlock": 1024,
    "MultiProcessorCount": 132,
}
ADA = {**H200, "MaxThreadsPerMultiProcessor": 1536, "MultiProcessorCount": 128}
TURING = {**H200, "MaxThreadsPerMultiProcessor": 1024, "MultiProcessorCount": 40}
KINDS = [H200, ADA, TURING]
SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("attributes", "threads"),
    [
        (H200, 256),
        (ADA, 192),
        (TURING, 128),
        ({**H200, "MaxThreadsPerBlock": 100}, 96),
        ({**H200, "MaxThreadsPerMultiProcessor": 4096}, 256),
    ],
)
def test_eight_blocks_fill_a_multiprocessor_if_the_gpu_takes_them(attributes, threads):
    assert Geometry.of(attributes).threads == threads


@given(
    attributes=st.sampled_from(KINDS),
    itemsize=st.sampled_from(SIZES),
    num_items=st.integers(1, 2**45),
    blocks=st.integers(1, 8),
    long_items=st.booleans(),
)
def test_a_chunk_is_whole_vectors_for_each_thread_and_chunks_are_bounded(
    attributes, itemsize, num_items, blocks, long_items
):
    geometry = Geometry.of(attributes)
    chunk = geometry.chunk_size(num_items, itemsize, blocks, long_items=long_items)
    assert chunk * itemsize % (VECTOR * (32 if long_items else geometry.threads)) == 0
    assert num_items // chunk <= WAVES * blocks * attributes["MultiProcessorCount"]


@pytest.mark.parametrize("itemsize", SIZES)
def test_the_vectors_of_a_thread(itemsize):
    """One for little work, four for enough work, more only for huge arrays."""
    geometry = Geometry.of(H200)
    unit = VECTOR // itemsize * geometry.threads
    expected = {1: 1, 1056: 1, 2 * 1056: 2, 4 * 1056: 4, 10_000: 4, 64 * 4 * 1056: 4, 2**20: 16}
    found = {units: geometry.chunk_size(units * unit, itemsize, 8) // unit for units in expected}
    assert found == expected
    # A quarter of the chunks occupies a quarter of the blocks.
    assert geometry.chunk_size(1056 * unit, itemsize, 2) == 4 * unit


@pytest.mark.parametrize(("attributes", "warps"), [(H200, 1), (ADA, 3), (TURING, 1)])
def test_little_work_of_long_items_is_spread_over_blocks_of_few_warps(attributes, warps):
    """Otherwise the second pass of a norm of 16 M elements would be 16 blocks of a large GPU."""
    geometry = Geometry.of(attributes)
    assert geometry.chunk_size(8, 8, 1, long_items=True) == 2 * 32 * warps
    assert geometry.chunk_size(8, 8, 1) == 2 * geometry.threads
    enough = 64 * 2 * geometry.threads * attributes["MultiProcessorCount"]
    for long_items in (False, True):
        assert geometry.chunk_size(enough, 8, 1, long_items=long_items) == 8 * geometry.threads


@pytest.mark.parametrize(
    ("num_items", "num_chunks", "itemsize", "threads"),
    [
        (1, 1, 4, 32),
        (256 * 10_000, 10_000, 4, 64),  # 1 KB per row: two warps, no idle thread
        (64 * 10_000, 10_000, 4, 32),
        (4096 * 100, 100, 4, 256),
        (1024 * 100, 100, 2, 128),
        (4 * 97, 1, 4, 128),
        (10 * 256 + 10 * 4096, 20, 4, 256),
    ],
)
def test_a_block_has_the_threads_that_the_average_chunk_has_vectors(
    num_items, num_chunks, itemsize, threads
):
    assert Geometry.of(H200).block(num_items, num_chunks, itemsize) == threads
