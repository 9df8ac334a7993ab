"""Every update rule on every face, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import FLOATS, random_data, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPLIT_SIZE,
    Operand,
    buffers,
    operands,
    random_terms,
    recorded,
    spread,
    start_patterns,
    wide_of,
)
from support.update_formulas import (
    FORMULAS,
    adagrad_rule,
    adam_rule,
    momentum_rule,
    nesterov_rule,
    rmsprop_centered_rule,
    rmsprop_rule,
    sgd_rule,
)

from gradreduce.ops import adagrad, adam, momentum, nesterov, rmsprop, rmsprop_centered, sgd

RATE, DECAY, REST, EPSILON = 0.1, 0.9, 0.3, 0.01  # no float has one exactly: the casts show
HALVES = FLOATS[:2]
SINGLE = np.dtype("float32")


class Rule:
    """One rule: its launcher, called with a list of rows, and its formula.

    A row is the variable, its master if it has one, the slots, and the gradient.
    """

    def __init__(self, launch, formula, num_slots, *, master=False, **scalars):
        self.launcher, self.formula, self.has_master = launch, formula, master
        self.num_operands = 2 + num_slots + master
        self.scalars = scalars
        self.dtypes = HALVES if master else FLOATS

    def launch(self, rows, **scalars):
        self.launcher(rows, **(self.scalars | scalars))

    def values(self, size, dtype, seed=0):
        """Data for a row of a variable of a dtype; every third master is not its variable's."""
        parts = random_terms(self.num_operands, size, dtype, seed=seed)
        if self.has_master:
            parts[1:-1] = random_terms(self.num_operands - 2, size, SINGLE, seed=seed + 1)
            with np.errstate(all="ignore"):
                parts[0][::3] = parts[1].astype(parts[0].dtype)[::3]
        return parts

    def reference(self, values, **scalars):
        values, dtype, wide = list(values), values[0].dtype, wide_of(values[0].dtype)
        with np.errstate(all="ignore"):
            given = [wide.type(scalar) for scalar in (self.scalars | scalars).values()]
            if self.has_master:
                master = values.pop(1)
                values[0] = np.where(master.astype(dtype) == values[0], master, values[0])
            changed = self.formula(*(part.astype(wide) for part in values), *given)
            if self.has_master:
                return [changed[0].astype(dtype), *changed]
            return [part.astype(dtype) for part in changed]


ADAM = {"lr": RATE, "one_minus_beta1": REST, "one_minus_beta2": 1 - DECAY, "epsilon": EPSILON}
RMSPROP = {"lr": RATE, "one_minus_decay": REST, "decay": DECAY, "epsilon": EPSILON}
RULES = {
    "sgd": Rule(sgd, sgd_rule, 0, lr=RATE),
    "momentum": Rule(momentum, momentum_rule, 1, lr=RATE, decay=DECAY),
    "nesterov": Rule(nesterov, nesterov_rule, 1, lr=RATE, decay=DECAY),
    "adam": Rule(adam, adam_rule, 2, **ADAM),
    "adagrad": Rule(adagrad, adagrad_rule, 1, lr=RATE),
    "rmsprop": Rule(rmsprop, rmsprop_rule, 2, **RMSPROP),
    "rmsprop_centered": Rule(rmsprop_centered, rmsprop_centered_rule, 3, **RMSPROP),
    "sgd-master": Rule(sgd, sgd_rule, 0, master=True, lr=RATE),
    "nesterov-master": Rule(nesterov, nesterov_rule, 1, master=True, lr=RATE, decay=DECAY),
    "adam-master": Rule(adam, adam_rule, 2, master=True, **ADAM),
}
# One body of the kernels serves all rules: what no formula touches is tried with a few.
FEW = ["sgd", "adam", "nesterov-master"]


def cases(names):
    """Each of these rules with each dtype that it has."""
    found = [(name, dtype) for name in names for dtype in RULES[name].dtypes]
    values = [pytest.param(RULES[name], dtype, id=f"{name}-{dtype}") for name, dtype in found]
    return pytest.mark.parametrize(("rule", "dtype"), values)


@pytest.fixture(params=[rule for rule in RULES.values() if not rule.has_master])
def rule(request):
    return request.param


def check(device, rule, rows, starts=None, **scalars):
    """Updates every row in one call, and looks at every byte."""
    made = [
        operands(device, row, places)
        for row, places in zip(rows, starts or [None] * len(rows), strict=True)
    ]
    rule.launch([buffers(row) for row in made], **scalars)
    for (*written, grad), values in zip(made, rows, strict=True):
        for operand, expected in zip(written, rule.reference(values, **scalars), strict=True):
            assert same(operand.array, expected), (operand.buffer, starts)
            assert operand.contained()
        assert grad.unchanged()


def test_every_rule_is_here():
    assert FORMULAS.keys() == {name.removesuffix("-master") for name in RULES}


@cases(FEW)
def test_every_size_and_start(device, rule, dtype):
    values = rule.values(max(SIZES), dtype)
    for size in SIZES:
        for starts in start_patterns(rule.num_operands):
            check(device, rule, [[part[:size] for part in values]], [starts])


@cases(RULES)
@pytest.mark.parametrize("lr", [0, 1, 0.001, -3, 1e300, float("inf"), float("nan")])
def test_any_rate(device, rule, dtype, lr):
    check(device, rule, [rule.values(1003, dtype)], lr=lr)


@cases(["momentum", "nesterov", "adam", "rmsprop", "adam-master"])
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
    for num_rows in (6, len(sizes)):  # the table inline, and beyond
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
        (rule.launcher.__name__, 1000)
    ]


@cases(FEW)
def test_large_rows_are_spread_over_threads(device, rule, dtype):
    with spread(device) as num_jobs:
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
        rule.launch([])
        check(device, rule, [random_terms(rule.num_operands, 0, "float32")] * 3)
    assert journal.launches == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shift", [-15, -1, 0, 1, 15])
def test_operands_that_overlap_are_refused(device, rule, dtype, shift):
    """Not even exactly the same: a rule that reads what it has written is another rule."""
    for first in range(rule.num_operands):
        for second in range(first):
            memory = Operand(device, random_data((48,), dtype))
            others = operands(device, random_terms(rule.num_operands, 16, dtype))
            row = buffers(others)
            row[first] = memory.buffer.view(16, (16,))
            row[second] = memory.buffer.view(16 + shift, (16,))
            with pytest.raises(ValueError, match="overlaps operand"):
                rule.launch([buffers(others), row])
            assert all(operand.unchanged() for operand in [memory, *others])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 15), ("float16", 16), ("float64", 16)])
def test_an_operand_that_does_not_fit_changes_nothing(device, rule, place, dtype, size):
    good = operands(device, random_terms(rule.num_operands, 16, "float64"))
    row = operands(device, random_terms(rule.num_operands, 16, "float32"))
    row[place] = Operand(device, random_data((size,), dtype))
    with recorded(device) as journal, pytest.raises(ValueError, match=rule.launcher.__name__):
        rule.launch([buffers(good), buffers(row)])
    assert journal.launches == 0
    assert all(operand.unchanged() for operand in [*good, *row])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64"])
def test_other_dtypes_are_refused(device, rule, dtype):
    good = operands(device, random_terms(rule.num_operands, 16, "float64"))
    row = operands(device, random_terms(rule.num_operands, 16, dtype))
    with recorded(device) as journal, pytest.raises(ValueError, match="float dtype"):
        rule.launch([buffers(good), buffers(row)])
    assert journal.launches == 0
    assert all(operand.unchanged() for operand in [*good, *row])


def test_a_row_of_too_many_or_too_few_operands_changes_nothing(device, rule):
    good, row = (operands(device, random_terms(rule.num_operands, 16, "float32")) for _ in range(2))
    extra = operands(device, random_terms(2, 16, "float32"))
    for wrong in (row[1:], [*row, *extra]):
        with pytest.raises(ValueError, match=rule.launcher.__name__):
            rule.launch([buffers(good), buffers(wrong)])
    assert all(operand.unchanged() for operand in [*good, *row, *extra])


@pytest.mark.parametrize(
    ("var", "master", "slot"),
    [
        ("float16", "float16", "float16"),
        ("float32", "float32", "float32"),
        ("bfloat16", "float64", "float64"),
        ("float32", "float16", "float16"),
        ("float64", "float32", "float32"),
        ("float16", "float32", "float16"),
    ],
)
def test_a_master_is_a_float32_beside_a_half(device, var, master, slot):
    dtypes = [var, master, slot, slot, var]
    row = [Operand(device, random_data((16,), dtype)) for dtype in dtypes]
    with pytest.raises(ValueError, match=r"adam: (.* cannot be a master|dtypes differ)"):
        adam([buffers(row)], **ADAM)
    assert all(operand.unchanged() for operand in row)


def test_a_master_keeps_what_its_half_rounds_away(device):
    """Steps too small for a half: none shows in it by itself, all of them do with a master."""
    half, grad = np.ones(40, np.float16), np.ones(40, np.float16)
    alone, kept = Operand(device, half), Operand(device, half)
    master = Operand(device, half.astype(SINGLE))
    given = Operand(device, grad).buffer
    for _ in range(100):
        sgd([[alone.buffer, given], [kept.buffer, master.buffer, given]], lr=2.0**-13)
    assert (alone.array == 1).all()
    assert (master.array == 1 - 100 * 2.0**-13).all()
    assert (kept.array == np.float16(1 - 100 * 2.0**-13)).all()
    kept.array[:20] = 5  # assigned to
    sgd([[kept.buffer, master.buffer, given]], lr=2.0**-13)
    assert (master.array[:20] == 5 - 2.0**-13).all()
    assert (master.array[20:] == 1 - 101 * 2.0**-13).all()


def test_the_gradient_may_be_read_only_and_nothing_else(device, rule):
    for place in range(rule.num_operands):
        good = operands(device, random_terms(rule.num_operands, 16, "float64"))
        row = operands(device, random_terms(rule.num_operands, 16, "float32"))
        row[place] = Operand(device, row[place].values, writable=False)
        if place == rule.num_operands - 1:
            rule.launch([buffers(good), buffers(row)])
            assert not row[0].unchanged()
            continue
        with recorded(device) as journal, pytest.raises(ValueError, match="read-only"):
            rule.launch([buffers(good), buffers(row)])
        assert journal.launches == 0
        assert all(operand.unchanged() for operand in [*good, *row])


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
    rule.launch([buffers(row) for row in together], lr=lr)
    for row in alone:
        rule.launch([buffers(row)], lr=lr)
    for row, other in zip(together, alone, strict=True):
        for one, two in zip(row, other, strict=True):
            assert same(one.array, two.array)
            assert one.contained()
