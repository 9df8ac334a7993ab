"""AGN's push, global update and pull by every rule in every implementation, against its formula."""

from __future__ import annotations

import numpy as np
from support.implementations import buffers, operands
from support.update_operands import FormBody, changed

from gradreduce.ops import update_rows


class TestGlobalUpdate(FormBody):
    variant = "global"
    leads = 1, 10  # period

    def reference(self, case, values, lead):
        total = values[-1]
        new = changed(case, values, total / total.dtype.type(lead))
        has_master = case[2]
        return [*new, *new[: 1 + has_master]]

    def test_the_mean_is_a_division_and_no_product(self, device):
        """1/3 is no float: multiplying these by it gives other bits than dividing by 3."""
        total = np.arange(1, 1000, dtype=np.float32)
        assert (total / np.float32(3) != total * np.float32(1 / 3)).any()
        row = operands(device, [np.zeros(999, np.float32), np.empty(999, np.float32), total])
        update_rows(self.kernel_of("sgd"), [buffers(row)], (3, -1.0), device)
        assert (row[0].array == total / np.float32(3)).all()
        assert (row[1].array == row[0].array).all()
