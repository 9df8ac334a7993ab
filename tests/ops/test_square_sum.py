"""square_sum in every implementation, against a plain loop; and norms of many tensors."""

import math
from itertools import chain

import numpy as np
import pytest
from support.exact_data import FLOATS, finite_data, random_data, same
from support.implementations import Operand, blank, recorded, start_patterns

from gradreduce.ops import BLOCK, block_sums, norm_of, num_blocks, square_sum

# lanes, terms, blocks, elements of the input
SIZES = [(1, 1, 1, 1), (1, 300, 1, 300), (16, 1, 1, 16), (16, 63, 1, 1000), (16, 9, 2, 5),
         (48, 258, 1, 12_345), (48, 50, 6, 12_345), (7, 4, 5, 100), (32, 64, 3, 4096),
         (32, 64, 3, 4097), (1, 32, 130, 4160), (32, 5, 1, 0)]  # fmt: skip


def summed(given, lanes, terms, blocks, squared, rooted):
    found = np.zeros(lanes * blocks)
    with np.errstate(all="ignore"):
        for place, value in enumerate(given.astype(np.float64)):
            sum_of = place // (lanes * terms) * lanes + place % lanes
            found[sum_of] += value * value if squared else value
        return np.sqrt(found) if rooted else found


def check(device, dtype, shapes, starts=(0, 0), **scalars):
    for lanes, terms in {shape[:2]: None for shape in shapes}:
        rows = []
        together = [shape for shape in shapes if shape[:2] == (lanes, terms)]
        for *_, blocks, size in together:
            values = random_data((size,), dtype, seed=size)
            given = Operand(device, values, starts[1], writable=False)
            rows.append((blank(device, lanes * blocks, "float64", starts[0]), given))
        outs, inputs = [out.buffer for out, _ in rows], [given.buffer for _, given in rows]
        square_sum(outs, inputs, lanes=lanes, terms=terms, **scalars)
        for (*_, blocks, _), (out, given) in zip(together, rows, strict=True):
            how = scalars.get("squared", True), scalars.get("rooted")
            assert same(out.array, summed(given.values, lanes, terms, blocks, *how))
            assert out.contained()
            assert given.unchanged()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_size_and_start(device, dtype):
    for starts in start_patterns(2):
        check(device, dtype, SIZES, starts)
    check(device, dtype, SIZES, squared=False)
    check(device, dtype, SIZES, rooted=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_geometry(geometric_device, dtype):
    check(geometric_device, dtype, SIZES)


def test_one_launch_for_each_dtype(device):
    outs = [device.empty((16,), "float64") for _ in range(200)]
    given = [device.put(finite_data((5,), dtype)) for dtype in ("float32", "float16")] * 100
    with recorded(device) as journal:
        square_sum(outs, given, lanes=4, terms=2)
    assert [(each.name, each.num_rows) for each in journal.records] == [("square_sum", 100)] * 2


@pytest.mark.parametrize("size", [0, 1, 2047, 2049, 300_001])
def test_a_norm_is_that_of_all_tensors(device, size):
    arrays = [finite_data((size,), dtype, seed=place) for place, dtype in enumerate(FLOATS)]
    sums = block_sums([device.put(array) for array in arrays], device)
    found = norm_of(sums).numpy()
    squares = (np.square(array, dtype=np.float64).data for array in arrays)
    wanted = math.sqrt(math.fsum(chain.from_iterable(squares)))
    assert sums.shape == (len(FLOATS) * num_blocks(size),)
    assert found.shape == (1,)
    assert abs(found[0] - wanted) <= 1e-14 * wanted


def test_the_sum_of_a_block_depends_on_its_elements_alone(device):
    array = random_data((3 * BLOCK + 5,), "float32")
    sums = block_sums([device.put(array[:3]), device.put(array)], device).numpy()
    for block, total in enumerate(sums[1:]):
        start = block * BLOCK
        (alone,) = block_sums([device.put(array[start : start + BLOCK])], device).numpy()
        assert same(alone, total)
