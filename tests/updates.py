"""What the operands of an update are, of every rule in every form: the tests' own word for it."""

from __future__ import annotations

from collections.abc import Sequence

from faces import wide_of
from formulas import FORMULAS

from gradreduce.device import as_dtype
from gradreduce.device.kernel import Template
from gradreduce.ops import RuleKernel


def rule_of(kernel: RuleKernel) -> str:
    """The name of its rule."""
    return kernel.name.removeprefix(f"{kernel.form}_")


def layout(kernel: RuleKernel, template: Template) -> list[tuple[str, str]]:
    """What each operand of a row is, and its dtype; all but the last are written."""
    dtype, state = (str(part) for part in template)
    wide = wide_of(as_dtype(dtype)).name
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
        *more[kernel.form],
    ]


def given(
    kernel: RuleKernel,
    template: Template,
    scalars: Sequence[float],
    *,
    first: int = 0,
    period: int = 3,
) -> tuple[float, ...]:
    """All that the kernel takes; ``scalars`` are those of its rule."""
    lead = {"plain": (), "local": (first,), "global": (period,)}[kernel.form]
    return (len(layout(kernel, template)) - 1, *lead, *scalars)
