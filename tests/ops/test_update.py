"""Every update rule in every implementation, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.implementations import Operand, accumulate_dtype_of
from support.update_formulas import FORMULAS
from support.update_operands import UpdateBody, changed

from gradreduce.ops import RULES


def test_every_rule_has_a_formula():
    assert FORMULAS.keys() == RULES.keys()


class TestUpdate(UpdateBody):
    variant = "plain"
    leads = ()

    def written(self, case, row, scalars):
        grad = row[-1]
        return changed(case, row, grad.astype(accumulate_dtype_of(grad.dtype)), scalars)

    @pytest.mark.parametrize("value", [0, 1, 0.001, -3, 0.999, 1e300, float("inf"), float("nan")])
    def test_any_scalar(self, device, case, value):
        rows = [self.row(case, 1003)]
        for scalar in RULES[case[0]].scalars:
            if scalar == "lr" or abs(value) <= 1 or np.isnan(value):
                self.check(device, case, rows, **{scalar: value})

    def test_a_master_keeps_the_bits_that_half_precision_rounds_away(self, device):
        """Steps too small for float16: each alone is rounded away, but a master adds them up."""
        half, grad = np.ones(40, np.float16), np.ones(40, np.float16)
        alone, kept = Operand(device, half), Operand(device, half)
        master = Operand(device, half.astype(np.float32))
        given = Operand(device, grad).buffer
        for _ in range(100):
            rows = [[alone.buffer, given], [kept.buffer, master.buffer, given]]
            self.launch(device, rows, name="sgd", lr=2.0**-13)
        assert (alone.array == 1).all()
        assert (master.array == 1 - 100 * 2.0**-13).all()
        assert (kept.array == np.float16(1 - 100 * 2.0**-13)).all()
        kept.array[:20] = 5  # assigned to
        self.launch(device, [[kept.buffer, master.buffer, given]], name="sgd", lr=2.0**-13)
        assert (master.array[:20] == 5 - 2.0**-13).all()
        assert (master.array[20:] == 1 - 101 * 2.0**-13).all()
