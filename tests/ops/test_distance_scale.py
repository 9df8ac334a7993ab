"""distance_scale in every implementation, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import FLOATS, same
from support.implementations import (
    accumulate_dtype_of,
    buffers,
    operands,
    random_terms,
    recorded,
    start_patterns,
)

from gradreduce.ops import distance_scale

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
GAMMA = 1e-4


def row_of(dtype, size, seed=0):
    """The operands: out, sum, center, pulled."""
    sums = random_terms(2, size, accumulate_dtype_of(np.dtype(dtype)), seed=seed)
    return [*sums, *random_terms(2, size, dtype, seed=seed + 1)]


def reference(values, gamma=GAMMA):
    _, total, center, pulled = values
    wide = total.dtype.type
    with np.errstate(all="ignore"):
        away = center.astype(total.dtype) - pulled.astype(total.dtype)
        return total / (away * away / wide(gamma) + wide(1))


def check(device, rows, starts=None, gamma=GAMMA):
    made = [
        operands(device, row, places)
        for row, places in zip(rows, starts or [None] * len(rows), strict=True)
    ]
    distance_scale(*zip(*[buffers(row) for row in made], strict=True), gamma=gamma)
    for (out, *read), values in zip(made, rows, strict=True):
        assert same(out.array, reference(values, gamma))
        assert out.contained()
        assert all(operand.unchanged() for operand in read)


@DTYPES
def test_every_size_and_start(device, dtype):
    for size in (0, 1, 7, 16, 17, 255, 16_385):
        for starts in start_patterns(4):
            check(device, [row_of(dtype, size)], [starts])


@DTYPES
def test_any_geometry(geometric_device, dtype):
    for size in (17, 40_000):
        check(geometric_device, [row_of(dtype, size)])


@pytest.mark.parametrize("gamma", [1e-300, 1, 1e300, float("inf")])
def test_any_gamma(device, gamma):
    check(device, [row_of("float64", 1003)], gamma=gamma)


def test_the_squared_distance_gamma_halves_a_sum_and_none_keeps_it(device):
    row = operands(
        device,
        [np.empty(2, np.float32), np.array([8, 8], np.float32),
         np.array([3, 3], np.float32), np.array([1, 3], np.float32)],
    )  # fmt: skip
    distance_scale(*[[each] for each in buffers(row)], gamma=4)
    assert row[0].array.tolist() == [4, 8]


def test_one_launch_for_each_dtype(device):
    with recorded(device) as journal:
        check(device, [row_of(dtype, size) for size in (5, 100, 0) for dtype in FLOATS])
    assert journal.launches == len(FLOATS)


def test_the_out_may_be_the_sum(device):
    values = row_of("float16", 100)
    row = operands(device, values)
    _, *others = buffers(row)
    distance_scale([others[0]], *[[each] for each in others], gamma=GAMMA)
    assert same(row[1].array, reference(values))
