"""square_sum in every implementation, against a plain loop; and norms of many tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.exact_data import FLOATS, finite_data, random_data, same
from support.implementations import Operand, blank, recorded, start_patterns

from gradreduce.ops import norm_of, square_sum

SIZES = [(1, 1), (1, 300), (16, 16), (16, 1000), (16, 5), (48, 12_345), (7, 100), (32, 0)]


def summed(given, num_sums, squared, rooted):
    found = np.zeros(num_sums)
    with np.errstate(all="ignore"):
        for place, value in enumerate(given.astype(np.float64)):
            found[place % num_sums] += value * value if squared else value
        return np.sqrt(found) if rooted else found


def check(device, dtype, sizes, starts=(0, 0), **scalars):
    rows = []
    for num_sums, size in sizes:
        given = Operand(device, random_data((size,), dtype, seed=size), starts[1])
        rows.append((blank(device, num_sums, "float64", starts[0]), given))
    square_sum([out.buffer for out, _ in rows], [given.buffer for _, given in rows], **scalars)
    for (num_sums, _), (out, given) in zip(sizes, rows, strict=True):
        wanted = summed(given.values, num_sums, scalars.get("squared", True), scalars.get("rooted"))
        assert same(out.array, wanted)
        assert out.contained()
        assert given.unchanged()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_size_and_start(device, dtype):
    for starts in start_patterns(2):
        for size in SIZES:
            check(device, dtype, [size], starts)
    check(device, dtype, SIZES, squared=False)
    check(device, dtype, SIZES, rooted=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_geometry(geometric_device, dtype):
    check(geometric_device, dtype, SIZES)


def test_one_launch_for_each_dtype(device):
    outs = [device.empty((16,), "float64") for _ in range(200)]
    given = [device.put(finite_data((5,), dtype)) for dtype in ("float32", "float16")] * 100
    with recorded(device) as journal:
        square_sum(outs, given)
    assert [(each.name, each.num_rows) for each in journal.records] == [("square_sum", 100)] * 2


@pytest.mark.parametrize("size", [0, 1, 255, 257, 100_003])
def test_a_norm_is_that_of_all_tensors(device, size):
    arrays = [finite_data((size,), dtype, seed=place) for place, dtype in enumerate(FLOATS)]
    found = norm_of([device.put(array) for array in arrays], device).numpy()
    wanted = math.sqrt(math.fsum(float(value) ** 2 for array in arrays for value in array))
    assert found.shape == (1,)
    assert abs(found[0] - wanted) <= 1e-14 * wanted
