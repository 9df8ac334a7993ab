"""Every update rule in every implementation, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import FLOATS, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPLIT_SIZE,
    Operand,
    accumulate_dtype_of,
    buffers,
    counted_threads,
    operands,
    random_terms,
    recorded,
    start_patterns,
)
from support.update_formulas import FORMULAS

from gradreduce.ops import RULE_KERNELS, update_rows
from gradreduce.ops import RULES as UPDATE_RULES

HALVES = FLOATS[:2]
SINGLE = np.dtype("float32")


class Rule:
    """One rule: its kernel and its formula.

    A row is the variable, its master if it has one, the slots, and the gradient.
    """

    def __init__(self, name, *, master=False):
        rule = UPDATE_RULES[name]
        self.kernel, self.has_master = RULE_KERNELS[rule, "plain"], master
        self.formula, num_slots, scalars = FORMULAS[name]
        self.num_operands = 2 + num_slots + master
        self.scalars = dict(zip(rule.scalars, scalars, strict=True))
        self.dtypes = HALVES if master else FLOATS

    def launch(self, device, rows, **scalars):
        update_rows(self.kernel, rows, tuple((self.scalars | scalars).values()), device)

    def values(self, size, dtype, seed=0):
        """Data for a row of a variable of a dtype; every third master differs from its variable."""
        parts = random_terms(self.num_operands, size, dtype, seed=seed)
        if self.has_master:
            parts[1:-1] = random_terms(self.num_operands - 2, size, SINGLE, seed=seed + 1)
            with np.errstate(all="ignore"):
                parts[0][::3] = parts[1].astype(parts[0].dtype)[::3]
        return parts

    def reference(self, values, **scalars):
        values, dtype, wide = list(values), values[0].dtype, accumulate_dtype_of(values[0].dtype)
        with np.errstate(all="ignore"):
            given = [wide.type(scalar) for scalar in (self.scalars | scalars).values()]
            if self.has_master:
                master = values.pop(1)
                values[0] = np.where(master.astype(dtype) == values[0], master, values[0])
            changed = self.formula(*(part.astype(wide) for part in values), *given)
            if self.has_master:
                return [changed[0].astype(dtype), *changed]
            return [part.astype(dtype) for part in changed]


WITH_MASTERS = ["sgd", "nesterov", "adam"]
RULES = {name: Rule(name) for name in FORMULAS}
RULES |= {f"{name}-master": Rule(name, master=True) for name in WITH_MASTERS}
# All rules share one kernel body: cases without the formula are tested with a few rules.
FEW = ["sgd", "adam", "nesterov-master"]


def cases(names):
    """Each of these rules with each of its dtypes."""
    found = [(name, dtype) for name in names for dtype in RULES[name].dtypes]
    values = [pytest.param(RULES[name], dtype, id=f"{name}-{dtype}") for name, dtype in found]
    return pytest.mark.parametrize(("rule", "dtype"), values)


@pytest.fixture(params=[rule for rule in RULES.values() if not rule.has_master])
def rule(request):
    return request.param


def check(device, rule, rows, starts=None, **scalars):
    """Updates every row in one call, and checks every byte."""
    made = [
        operands(device, row, places)
        for row, places in zip(rows, starts or [None] * len(rows), strict=True)
    ]
    rule.launch(device, [buffers(row) for row in made], **scalars)
    for (*written, grad), values in zip(made, rows, strict=True):
        for operand, expected in zip(written, rule.reference(values, **scalars), strict=True):
            assert same(operand.array, expected), (operand.buffer, starts)
            assert operand.contained()
        assert grad.unchanged()


def test_every_rule_has_a_formula():
    assert FORMULAS.keys() == UPDATE_RULES.keys()


@cases(FEW)
def test_every_size_and_start(device, rule, dtype):
    values = rule.values(max(SIZES), dtype)
    for size in SIZES:
        for starts in start_patterns(rule.num_operands):
            check(device, rule, [[part[:size] for part in values]], [starts])


@cases(RULES)
@pytest.mark.parametrize("lr", [0, 1, 0.001, -3, 1e300, float("inf"), float("nan")])
def test_any_learning_rate(device, rule, dtype, lr):
    check(device, rule, [rule.values(1003, dtype)], lr=lr)


@cases([name for name, rule in RULES.items() if len(rule.scalars) > 1])
@pytest.mark.parametrize("value", [0, 1, 0.999, -0.5, float("nan")])
def test_any_scalar(device, rule, dtype, value):
    for name in rule.scalars.keys() - {"lr"}:
        check(device, rule, [rule.values(1003, dtype)], **{name: value})


@cases(RULES)
def test_any_geometry(geometric_device, rule, dtype):
    for size in (1, 17, 16_385, 40_000):
        for starts in start_patterns(rule.num_operands)[:2]:
            check(geometric_device, rule, [rule.values(size, dtype)], [starts])


@cases(FEW)
def test_one_launch_for_rows_of_all_sizes(device, rule, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        rows = [rule.values(size, dtype, seed=size) for size in sizes]
        starts = [[row % 3, row % 2, 0, 1, row % 5][: rule.num_operands] for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, rule, rows[:num_rows], starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device, rule):
    rows = [rule.values(1 + row % 5, "float32", seed=row) for row in range(1000)]
    with recorded(device) as journal:
        check(device, rule, rows)
    assert [(record.name, record.num_rows) for record in journal.records] == [
        (rule.kernel.name, 1000)
    ]


@cases(FEW)
def test_large_rows_are_spread_over_threads(device, rule, dtype):
    with counted_threads(device) as num_jobs:
        for starts in start_patterns(rule.num_operands)[::3]:
            check(device, rule, [rule.values(SPLIT_SIZE, dtype)], [starts])
    assert num_jobs == [NUM_THREADS] * 2


def test_each_dtype_is_a_launch_of_its_own(device, rule):
    rows = [random_terms(rule.num_operands, 100, dtype) for _ in range(3) for dtype in FLOATS]
    with recorded(device) as journal:
        check(device, rule, rows)
    assert journal.launches == len(FLOATS)


def test_nothing_is_launched_for_nothing(device, rule):
    with recorded(device) as journal:
        rule.launch(device, [])
        check(device, rule, [random_terms(rule.num_operands, 0, "float32")] * 3)
    assert journal.launches == 0


def test_a_master_keeps_the_bits_that_half_precision_rounds_away(device):
    """Steps too small for float16: each alone is rounded away, but a master adds them up."""
    half, grad = np.ones(40, np.float16), np.ones(40, np.float16)
    alone, kept = Operand(device, half), Operand(device, half)
    master = Operand(device, half.astype(SINGLE))
    given, rule = Operand(device, grad).buffer, RULES["sgd"]
    for _ in range(100):
        rows = [[alone.buffer, given], [kept.buffer, master.buffer, given]]
        rule.launch(device, rows, lr=2.0**-13)
    assert (alone.array == 1).all()
    assert (master.array == 1 - 100 * 2.0**-13).all()
    assert (kept.array == np.float16(1 - 100 * 2.0**-13)).all()
    kept.array[:20] = 5  # assigned to
    rule.launch(device, [[kept.buffer, master.buffer, given]], lr=2.0**-13)
    assert (master.array[:20] == 5 - 2.0**-13).all()
    assert (master.array[20:] == 1 - 101 * 2.0**-13).all()


@settings(max_examples=examples(30), deadline=None)
@given(
    case=st.sampled_from([(name, dtype) for name in RULES for dtype in RULES[name].dtypes]),
    lr=st.floats(width=32),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_many_rows_are_as_one_launch_each(device, case, lr, sizes, starts):
    rule, dtype = RULES[case[0]], case[1]
    places = starts[: rule.num_operands]
    rows = [rule.values(size, dtype, seed=size) for size in sizes]
    together, alone = ([operands(device, row, places) for row in rows] for _ in range(2))
    rule.launch(device, [buffers(row) for row in together], lr=lr)
    for row in alone:
        rule.launch(device, [buffers(row)], lr=lr)
    for row, other in zip(together, alone, strict=True):
        for one, two in zip(row, other, strict=True):
            assert same(one.array, two.array)
            assert one.contained()
