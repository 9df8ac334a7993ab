"""The operands of update kernels, and one test body for AGN's local and global update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.exact_data import FLOATS, random_data, same
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SPLIT_SIZE,
    accumulate_dtype_of,
    buffers,
    counted_threads,
    operands,
    recorded,
    start_patterns,
)
from support.update_formulas import FORMULAS, master_or_variable

from gradreduce.device import as_dtype
from gradreduce.device.run.kernel import Template
from gradreduce.ops import KERNELS, RuleKernel, update_rows


def rule_of(kernel: RuleKernel) -> str:
    """The name of the kernel's rule."""
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
    period: int = 3,
) -> tuple[float, ...]:
    """All scalars of the kernel; ``scalars`` are those of its rule."""
    lead = {"plain": (), "local": (first,), "global": (period,)}[kernel.variant]
    return (len(layout(kernel, template)) - 1, *lead, *scalars)


SIZES = (0, 1, 7, 16, 17, 255, 16_385)
HALVES = FLOATS[:2]
# rule, dtype of the variable, whether it has a master
CASES = [(name, dtype, False) for name in FORMULAS for dtype in FLOATS]
CASES += [(name, dtype, True) for name in FORMULAS for dtype in HALVES]
cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}-{dtype}{'-master' * master}" for name, dtype, master in CASES]
)
few = pytest.mark.parametrize("case", [CASES[0], CASES[-2], CASES[1], ("adam", HALVES[1], True)])


def changed(case, values, grad):
    """Variable, master and slots after an update by a gradient in the accumulate type."""
    name, dtype, has_master = case
    formula, num_slots, scalars = FORMULAS[name]
    wide = accumulate_dtype_of(np.dtype(dtype))
    var, *state = values[: 1 + has_master + num_slots]
    start = master_or_variable(var, state.pop(0)) if has_master else var.astype(wide)
    numbers = [wide.type(scalar) for scalar in scalars]
    found = formula(start, *(part.astype(wide) for part in state), grad, *numbers)
    slots = [part.astype(old.dtype) for part, old in zip(found[1:], state, strict=True)]
    return [found[0].astype(dtype), *[found[0]] * has_master, *slots]


class FormBody:
    """Tests one variant with every rule and implementation against its formula, bit by bit.

    Attributes:
        variant: the variant.
        leads: two values of the scalar that the kernel takes before the scalars of the rule.
    """

    variant: str
    leads: tuple[int, int]

    def reference(self, case, values, lead):
        """The expected values of the operands that are written."""
        raise NotImplementedError

    def kernel_of(self, name):
        return next(kernel for kernel in KERNELS if kernel.name == f"{self.variant}_{name}")

    def row_of(self, case, size, seed=0):
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

    def launch(self, device, name, rows, lead=None):
        lead = self.leads[1] if lead is None else lead
        update_rows(self.kernel_of(name), rows, (lead, *FORMULAS[name][2]), device)

    def check(self, device, case, rows, starts=None, lead=None):
        """Updates every row in one call, and checks every byte."""
        lead = self.leads[1] if lead is None else lead
        made = [
            operands(device, row, places)
            for row, places in zip(rows, starts or [None] * len(rows), strict=True)
        ]
        self.launch(device, case[0], [buffers(row) for row in made], lead)
        for (*written, read), values in zip(made, rows, strict=True):
            with np.errstate(all="ignore"):
                wanted = self.reference(case, values, lead)
            for operand, expected in zip(written, wanted, strict=True):
                assert same(operand.array, expected), (operand.buffer, starts, lead)
                assert operand.contained()
            assert read.unchanged()

    @cases
    def test_the_rule_and_what_else_it_does(self, device, case):
        for lead in self.leads:
            self.check(device, case, [self.row_of(case, 1003)], lead=lead)

    @few
    def test_every_size_and_start(self, device, case):
        values = self.row_of(case, max(SIZES))
        for size in SIZES:
            for starts in start_patterns(len(values)):
                row = [part[:size] for part in values]
                self.check(device, case, [row], [starts], self.leads[size % 2])

    @cases
    def test_any_geometry(self, geometric_device, case):
        for size in (17, 40_000):
            values = self.row_of(case, size)
            for starts in start_patterns(len(values))[:2]:
                self.check(geometric_device, case, [values], [starts], self.leads[size % 2])

    @few
    def test_one_launch_for_rows_of_all_sizes(self, device, case):
        sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS)]
        with recorded(device) as journal:
            self.check(device, case, [self.row_of(case, size, seed=size) for size in sizes])
        assert [(record.name, record.num_rows) for record in journal.records] == [
            (f"{self.variant}_{case[0]}", len(sizes) - 1)
        ]

    @few
    def test_large_rows_are_spread_over_threads(self, device, case):
        with counted_threads(device) as num_jobs:
            self.check(device, case, [self.row_of(case, SPLIT_SIZE)])
        assert num_jobs == [NUM_THREADS]

    def test_each_dtype_is_a_launch_and_masters_are_another(self, device):
        found = [case for case in CASES if case[0] == "momentum"]
        rows = [buffers(operands(device, self.row_of(case, 100))) for case in found * 2]
        with recorded(device) as journal:
            self.launch(device, "momentum", rows)
        assert journal.launches == len(found)

    def test_nothing_is_launched_for_nothing(self, device):
        with recorded(device) as journal:
            self.launch(device, "sgd", [])
            self.check(device, CASES[0], [self.row_of(CASES[0], 0)])
        assert journal.launches == 0
