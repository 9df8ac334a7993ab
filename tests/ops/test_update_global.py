"""AGN's push, global update and pull by every rule in every implementation, against its formula."""

from __future__ import annotations

from support.update_operands import UpdateBody, changed


class TestGlobalUpdate(UpdateBody):
    variant = "global"
    leads = 1, 10  # period

    def written(self, case, row, scalars, lead):
        total = row[-1]
        new = changed(case, row, total / total.dtype.type(lead), scalars)
        has_master = case[2]
        return [*new, *new[: 1 + has_master]]
