"""AGN's local update by every rule in every implementation, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
from support.implementations import accumulate_dtype_of
from support.update_operands import FormBody, changed


class TestLocalUpdate(FormBody):
    variant = "local"
    leads = 1, 0  # first

    def reference(self, case, values, lead):
        *_, total, grad = values
        wide = grad.astype(accumulate_dtype_of(grad.dtype))
        return [*changed(case, values, wide), wide if lead else total + wide]

    def test_the_first_step_does_not_read_the_sum(self, device):
        case = ("sgd", "float32", False)
        values = self.row_of(case, 40)
        values[1][:] = np.nan
        self.check(device, case, [values], lead=1)
