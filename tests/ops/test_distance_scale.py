"""distance_scale in every implementation, against its formula, bit by bit."""

import numpy as np
import pytest
from support.exact_data import FLOATS, same
from support.implementations import (
    accumulate_dtype_of,
    buffers,
    operands,
    random_terms,
)
from support.row_body import RowBody

from gradreduce.ops import distance_scale

GAMMA = 1e-4


def reference(values, gamma=GAMMA):
    _, total, center, pulled = values
    wide = total.dtype.type
    with np.errstate(all="ignore"):
        away = center.astype(total.dtype) - pulled.astype(total.dtype)
        return total / (away * away / wide(gamma) + wide(1))


class TestDistanceScale(RowBody):
    name = "distance_scale"
    cases = FLOATS
    few = FLOATS[:2]
    groups = tuple({"case": dtype} for dtype in FLOATS)

    def row(self, case, size, seed=0):
        """The operands: out, sum, center, pulled."""
        sums = random_terms(2, size, accumulate_dtype_of(case), seed=seed)
        return [*sums, *random_terms(2, size, case, seed=seed + 1)]

    def launch(self, device, rows, gamma=GAMMA):
        distance_scale(*map(list, zip(*rows, strict=True)) if rows else [[]] * 4, gamma=gamma)

    def reference(self, case, row, gamma=GAMMA):
        return [reference(row, gamma)]

    @pytest.mark.parametrize("gamma", [1e-300, 1, 1e300, float("inf")])
    def test_any_gamma(self, device, gamma):
        case = FLOATS[-1]
        self.check(device, case, [self.row(case, 1003)], gamma=gamma)

    def test_the_out_may_be_the_sum(self, device):
        values = self.row(FLOATS[0], 100)
        row = operands(device, values)
        _, *others = buffers(row)
        self.launch(device, [[others[0], *others]])
        assert same(row[1].array, reference(values))


def test_the_squared_distance_gamma_halves_a_sum_and_none_keeps_it(device):
    row = operands(
        device,
        [np.empty(2, np.float32), np.array([8, 8], np.float32),
         np.array([3, 3], np.float32), np.array([1, 3], np.float32)],
    )  # fmt: skip
    distance_scale(*[[each] for each in buffers(row)], gamma=4)
    assert row[0].array.tolist() == [4, 8]
