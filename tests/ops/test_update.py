"""sgd, momentum and nesterov on every face, against their formulas, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from exact import FLOATS, random_data, same
from faces import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPREAD_SIZE,
    Operand,
    buffers,
    operands,
    random_terms,
    recorded,
    spread,
    start_patterns,
    wide_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gradreduce.ops import momentum, nesterov, sgd

RATE, DECAY = 0.1, 0.9  # no float has either exactly: the casts show


# The rules as in the header of update.cu, with NumPy's operators: each rounds once. Every array and
# scalar comes in the accumulate type; what is returned is rounded to the dtype at the end.


def sgd_rule(var, grad, rate):
    return [var - rate * grad]


def momentum_rule(var, mom, grad, rate, decay):
    mom = decay * mom + grad
    return [var - rate * mom, mom]


def nesterov_rule(var, mom, grad, rate, decay):
    mom = decay * mom + grad
    return [var - (rate * grad + rate * decay * mom), mom]


class Rule:
    """One rule: its launcher, called with a list of rows, and its formula.

    A row is the variable, the slots, and the gradient.
    """

    def __init__(self, launch, formula, num_operands, **scalars):
        self.launcher, self.formula, self.num_operands = launch, formula, num_operands
        self.scalars = scalars

    def launch(self, rows, **scalars):
        columns = [[row[place] for row in rows] for place in range(self.num_operands)]
        self.launcher(*columns, **(self.scalars | scalars))

    def reference(self, values, **scalars):
        dtype, wide = values[0].dtype, wide_of(values[0].dtype)
        with np.errstate(all="ignore"):
            given = [wide.type(scalar) for scalar in (self.scalars | scalars).values()]
            changed = self.formula(*(part.astype(wide) for part in values), *given)
            return [part.astype(dtype) for part in changed]


RULES = {
    "sgd": Rule(sgd, sgd_rule, 2, rate=RATE),
    "momentum": Rule(momentum, momentum_rule, 3, rate=RATE, decay=DECAY),
    "nesterov": Rule(nesterov, nesterov_rule, 3, rate=RATE, decay=DECAY),
}


@pytest.fixture(params=RULES.values(), ids=RULES)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_size_and_start(device, rule, dtype):
    values = random_terms(rule.num_operands, max(SIZES), dtype)
    for size in SIZES:
        for starts in start_patterns(rule.num_operands):
            check(device, rule, [[part[:size] for part in values]], [starts])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rate", [0, 1, 0.001, -3, 1e300, float("inf"), float("nan")])
def test_any_rate(device, rule, dtype, rate):
    check(device, rule, [random_terms(rule.num_operands, 1003, dtype)], rate=rate)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["momentum", "nesterov"])
@pytest.mark.parametrize("decay", [0, 1, 0.999, -0.5, float("nan")])
def test_any_decay(device, name, dtype, decay):
    check(device, RULES[name], [random_terms(3, 1003, dtype)], decay=decay)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_geometry(geometric_device, rule, dtype):
    for size in (1, 17, 255, 16_385, 40_000):
        for starts in start_patterns(rule.num_operands)[:2]:
            check(geometric_device, rule, [random_terms(rule.num_operands, size, dtype)], [starts])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, rule, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # the table inline, and beyond
        rows = [random_terms(rule.num_operands, size, dtype, seed=size) for size in sizes]
        starts = [[row % 3, row % 2, 0][: rule.num_operands] for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, rule, rows[:num_rows], starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device, rule):
    rows = [
        random_terms(rule.num_operands, 1 + row % 5, "float32", seed=row) for row in range(1000)
    ]
    with recorded(device) as journal:
        check(device, rule, rows)
    assert [(record.name, record.num_rows) for record in journal.records] == [
        (rule.launcher.__name__, 1000)
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_rows_are_spread_over_threads(device, rule, dtype):
    with spread(device) as num_jobs:
        for starts in start_patterns(rule.num_operands)[::3]:
            check(device, rule, [random_terms(rule.num_operands, SPREAD_SIZE, dtype)], [starts])
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


def test_lists_of_different_lengths_change_nothing(device, rule):
    row = operands(device, random_terms(rule.num_operands, 16, "float32"))
    columns = [[buffer] for buffer in buffers(row)]
    with pytest.raises(ValueError, match="zip"):
        rule.launcher(*columns[:-1], columns[-1] * 2, **rule.scalars)
    assert all(operand.unchanged() for operand in row)


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


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(list(RULES)),
    rate=st.floats(width=32),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_many_rows_are_as_one_launch_each(device, dtype, name, rate, sizes, starts):
    rule = RULES[name]
    places = starts[: rule.num_operands]
    rows = [random_terms(rule.num_operands, size, dtype, seed=size) for size in sizes]
    together, alone = ([operands(device, row, places) for row in rows] for _ in range(2))
    rule.launch([buffers(row) for row in together], rate=rate)
    for row in alone:
        rule.launch([buffers(row)], rate=rate)
    for row, other in zip(together, alone, strict=True):
        for one, two in zip(row, other, strict=True):
            assert same(one.array, two.array)
            assert one.contained()
