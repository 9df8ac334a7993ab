"""AGN's local update by every rule in every implementation, against its formula, bit by bit."""

from __future__ import annotations

from support.implementations import accumulate_dtype_of
from support.update_operands import UpdateBody, changed


class TestLocalUpdate(UpdateBody):
    variant = "local"
    leads = 1, 0  # first

    def written(self, case, row, scalars, lead):
        *_, total, grad = row
        wide = grad.astype(accumulate_dtype_of(grad.dtype))
        return [*changed(case, row, wide, scalars), wide if lead else total + wide]
