"""The operands of update kernels, and one test body for their three variants."""

from collections.abc import Sequence

import numpy as np
from support.exact_data import FLOATS, random_data
from support.implementations import accumulate_dtype_of
from support.row_body import RowBody
from support.update_formulas import FORMULAS, master_or_variable

from gradreduce.device import as_dtype
from gradreduce.device.run.kernel import Template
from gradreduce.ops import RULE_KERNELS, RULES, RuleKernel, update_rows


def rule_of(kernel: RuleKernel) -> str:
    return kernel.name.removeprefix(f"{kernel.variant}_")


def layout(kernel: RuleKernel, template: Template) -> list[tuple[str, str]]:
    """Name and dtype of each operand of a row. All but the last are written."""
    dtype, state = (str(part) for part in template)
    wide = accumulate_dtype_of(as_dtype(dtype)).name
    has_master = dtype != state
    more = {
        "plain": [("grad", dtype)],
        "local": [("sum", wide), ("grad", dtype)],
        "global": [("copy", dtype), *[("copy", state)] * has_master, ("sum", wide)],
    }
    num_slots = FORMULAS[rule_of(kernel)][1]
    return [
        ("var", dtype),
        *[("master", state)] * has_master,
        *[("slot", state)] * num_slots,
        *more[kernel.variant],
    ]


def all_scalars(
    kernel: RuleKernel,
    template: Template,
    scalars: Sequence[float],
    *,
    first: int = 0,
    divisor: float = 3.0,
) -> tuple[float, ...]:
    """All scalars of the kernel; ``scalars`` are those of its rule."""
    lead = {"plain": (), "local": (first,), "global": (divisor,)}[kernel.variant]
    return (len(layout(kernel, template)) - 1, *lead, *scalars)


HALVES = FLOATS[:2]
# rule, dtype of the variable, whether it has a master
CASES = [(name, dtype, False) for name in FORMULAS for dtype in FLOATS]
CASES += [(name, dtype, True) for name in FORMULAS for dtype in HALVES]


def changed(case, values, grad, given):
    """Variable, master and slots after an update by a gradient in the accumulate type.

    ``given`` replaces scalars of the rule.
    """
    name, dtype, has_master = case
    formula, num_slots, scalars = FORMULAS[name]
    scalars = (dict(zip(RULES[name].scalars, scalars, strict=True)) | given).values()
    wide = accumulate_dtype_of(np.dtype(dtype))
    var, *state = values[: 1 + has_master + num_slots]
    start = master_or_variable(var, state.pop(0)) if has_master else var.astype(wide)
    numbers = [wide.type(scalar) for scalar in scalars]
    found = formula(start, *(part.astype(wide) for part in state), grad, *numbers)
    slots = [part.astype(old.dtype) for part, old in zip(found[1:], state, strict=True)]
    return [found[0].astype(dtype), *[found[0]] * has_master, *slots]


class UpdateBody(RowBody):
    """Every rule in one variant of the kernel, against its formula."""

    cases = CASES
    few = (CASES[0], CASES[-2], CASES[1], ("adam", HALVES[1], True))
    sized = few  # all rules share one kernel body
    groups = tuple({"case": case} for case in CASES if case[0] == "momentum")
    variant: str  # the variant
    # Values of the scalar that the kernel takes before the scalars of the rule.
    leads: tuple[int, ...]

    def name_of(self, case):
        return {"plain": case[0]}.get(self.variant, f"{self.variant}_{case[0]}")

    def kernel_of(self, name):
        return RULE_KERNELS[RULES[name], self.variant]

    def row(self, case, size, seed=0):
        """Random operands; every third master equals its variable, the others differ."""
        name, dtype, has_master = case
        template = (str(dtype), "float32" if has_master else str(dtype))
        found = layout(self.kernel_of(name), template)
        row = [
            random_data((size,), as_dtype(dtype), seed=seed + place)
            for place, (_, dtype) in enumerate(found)
        ]
        with np.errstate(all="ignore"):
            if has_master:
                row[0][::3] = row[1].astype(dtype)[::3]
        return row

    def lead_of(self, lead):
        return [self.leads[-1] if lead is None else lead] if self.leads else []

    def launch(self, device, rows, lead=None, name="momentum", **scalars):
        """All rows have the rule ``name``; ``scalars`` replace those of its formula."""
        given = dict(zip(RULES[name].scalars, FORMULAS[name][2], strict=True)) | scalars
        all_scalars = (*self.lead_of(lead), *given.values())
        update_rows(self.kernel_of(name), rows, all_scalars, device)

    def reference(self, case, row, lead=None, name="momentum", **scalars):
        with np.errstate(all="ignore"):
            return self.written(case, row, scalars, *self.lead_of(lead))

    def written(self, case, row, scalars, *lead):
        raise NotImplementedError

    def check(self, device, case, rows, starts=None, **options):
        super().check(device, case, rows, starts, name=case[0], **options)

    def test_the_rule_and_what_else_it_does(self, device, case):
        for lead in self.leads:
            self.check(device, case, [self.row(case, 1003)], lead=lead)
