"""AGN's push, global update and pull by every rule in every implementation, against its formula."""

from __future__ import annotations

import numpy as np
from support.implementations import buffers, operands
from support.update_operands import UpdateBody, changed


class TestGlobalUpdate(UpdateBody):
    variant = "global"
    leads = 1, 10  # period

    def written(self, case, row, scalars, lead):
        total = row[-1]
        new = changed(case, row, total / total.dtype.type(lead), scalars)
        has_master = case[2]
        return [*new, *new[: 1 + has_master]]

    def test_the_mean_is_a_division_and_no_product(self, device):
        """1/3 is no float: multiplying these by it gives other bits than dividing by 3."""
        total = np.arange(1, 1000, dtype=np.float32)
        assert (total / np.float32(3) != total * np.float32(1 / 3)).any()
        row = operands(device, [np.zeros(999, np.float32), np.empty(999, np.float32), total])
        self.launch(device, [buffers(row)], 3, "sgd", lr=-1.0)
        assert (row[0].array == total / np.float32(3)).all()
        assert (row[1].array == row[0].array).all()
