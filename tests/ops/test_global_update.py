"""AGN's push, global update and pull by every rule on every face, against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from support.implementations import buffers, operands
from support.update_operands import FormBody, changed

from gradreduce.ops import global_update


class TestGlobalUpdate(FormBody):
    variant = "global"
    launcher = staticmethod(global_update)
    lead, leads = "period", (1, 10)

    def reference(self, case, values, lead):
        total = values[-1]
        new = changed(case, values, total / total.dtype.type(lead))
        has_master = case[2]
        return [*new, *new[: 1 + has_master]]

    def test_the_mean_is_a_division_and_no_product(self, device):
        """1/3 is no float: a third of these is off by a bit when multiplied by it."""
        total = np.arange(1, 1000, dtype=np.float32)
        assert (total / np.float32(3) != total * np.float32(1 / 3)).any()
        row = operands(device, [np.zeros(999, np.float32), np.empty(999, np.float32), total])
        global_update(self.kernel_of("sgd"), [buffers(row)], period=3, scalars=(-1.0,))
        assert (row[0].array == total / np.float32(3)).all()
        assert (row[1].array == row[0].array).all()

    @pytest.mark.parametrize(
        ("dtypes", "message"),
        [
            (("float16", "float16", "float16"), "must have the accumulate dtype"),
            (("float32", "float32", "float64"), "must have the accumulate dtype"),
            (("float32", "float64", "float32"), "dtypes differ"),
            (("float16", "float32", "float16", "float16", "float32"), "dtypes differ"),
            (("int32", "int32", "int32"), "float dtype"),
            (("float64", "float32", "float64", "float32", "float64"), "cannot be a master"),
            (("float32",) * 4, "a row has 4 operands; expected 3, or 5 with masters"),
        ],
    )
    def test_operands_that_do_not_fit_change_nothing(self, device, dtypes, message):
        self.refuse(device, dtypes, message)
