"""AGN's local update by every rule on every face, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.implementations import wide_of
from support.update_operands import FormBody, changed

from gradreduce.ops import local_update


class TestLocalUpdate(FormBody):
    variant = "local"
    launcher = staticmethod(local_update)
    lead, leads = "first", (1, 0)

    def reference(self, case, values, lead):
        *_, total, grad = values
        wide = grad.astype(wide_of(grad.dtype))
        return [*changed(case, values, wide), wide if lead else total + wide]

    def test_what_the_sum_held_is_not_read_by_the_first(self, device):
        case = ("sgd", "float32", False)
        values = self.row_of(case, 40)
        values[1][:] = np.nan
        self.check(device, case, [values], lead=1)

    @pytest.mark.parametrize(
        ("dtypes", "message"),
        [
            (("float16", "float16", "float16"), "must have the accumulate dtype"),
            (("float32", "float64", "float32"), "must have the accumulate dtype"),
            (("float32", "float32", "float64"), "dtypes differ"),
            (("int32", "int32", "int32"), "float dtype"),
            (("float64", "float32", "float64", "float64"), "cannot be a master"),
            (("float32", "float32"), "a row has 2 operands; expected 3, or 4 with masters"),
        ],
    )
    def test_operands_that_do_not_fit_change_nothing(self, device, dtypes, message):
        self.refuse(device, dtypes, message)
