"""Every update rule in every implementation, against its formula, bit by bit."""

import numpy as np
import pytest
from support.implementations import accumulate_dtype_of
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


class TestGlobalUpdate(UpdateBody):
    """AGN's push, global update and pull."""

    variant = "global"
    leads = 1.0, 10.3  # divisor

    def written(self, case, row, scalars, lead):
        total = row[-1]
        new = changed(case, row, total / total.dtype.type(lead), scalars)
        has_master = case[2]
        return [*new, *new[: 1 + has_master]]


class TestLocalUpdate(UpdateBody):
    """AGN's local update."""

    variant = "local"
    leads = 1, 0  # first

    def written(self, case, row, scalars, lead):
        *_, total, grad = row
        wide = grad.astype(accumulate_dtype_of(grad.dtype))
        return [*changed(case, row, wide, scalars), wide if lead else total + wide]
