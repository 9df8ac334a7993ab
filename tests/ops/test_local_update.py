"""AGN's local update by every rule on every face, against its formula, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from exact import FLOATS, random_data, same
from faces import (
    INLINE_ROWS,
    NUM_THREADS,
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
from formulas import FORMULAS, master_or_variable

from gradreduce.ops import KERNELS, local_update

SIZES = (0, 1, 7, 16, 17, 255, 16_385)
HALVES = FLOATS[:2]
# rule, dtype of the variable, whether it has a master
CASES = [(name, dtype, False) for name in FORMULAS for dtype in FLOATS]
CASES += [(name, dtype, True) for name in FORMULAS for dtype in HALVES]
cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}-{dtype}{'-master' * master}" for name, dtype, master in CASES]
)
few = pytest.mark.parametrize("case", [CASES[0], CASES[-2], CASES[1], ("adam", HALVES[1], True)])


def kernel_of(name):
    return next(kernel for kernel in KERNELS if kernel.name == f"local_{name}")


def row_of(case, size, seed=0):
    """Variable, master, slots, sum and gradient; every third master is not its variable's."""
    name, dtype, has_master = case
    num_state = FORMULAS[name][1] + has_master
    wide = wide_of(np.dtype(dtype))
    var, grad = random_terms(2, size, dtype, seed=seed)
    state = random_terms(num_state, size, wide if has_master else dtype, seed=seed + 1)
    total = random_terms(1, size, wide, seed=seed + 2)
    with np.errstate(all="ignore"):
        if has_master:
            var[::3] = state[0].astype(dtype)[::3]
    return [var, *state, *total, grad]


def reference(case, values, first):
    name, dtype, has_master = case
    formula, _, scalars = FORMULAS[name]
    wide = wide_of(np.dtype(dtype))
    var, *state, total, grad = values
    with np.errstate(all="ignore"):
        g = grad.astype(wide)
        start = master_or_variable(var, state.pop(0)) if has_master else var.astype(wide)
        given = [wide.type(scalar) for scalar in scalars]
        changed = formula(start, *(part.astype(wide) for part in state), g, *given)
        new = changed[0].astype(dtype)
        slots = [part.astype(old.dtype) for part, old in zip(changed[1:], state, strict=True)]
        return [new, *([changed[0]] if has_master else []), *slots, g if first else total + g]


def check(device, case, rows, starts=None, first=0):
    made = [
        operands(device, row, places)
        for row, places in zip(rows, starts or [None] * len(rows), strict=True)
    ]
    kernel, scalars = kernel_of(case[0]), FORMULAS[case[0]][2]
    local_update(kernel, [buffers(row) for row in made], first=first, scalars=scalars)
    for (*written, grad), values in zip(made, rows, strict=True):
        for operand, expected in zip(written, reference(case, values, first), strict=True):
            assert same(operand.array, expected), operand.buffer
            assert operand.contained()
        assert grad.unchanged()


@cases
@pytest.mark.parametrize("first", [0, 1])
def test_the_rule_and_the_sum(device, case, first):
    check(device, case, [row_of(case, 1003)], first=first)


@few
def test_every_size_and_start(device, case):
    values = row_of(case, max(SIZES))
    for size in SIZES:
        for starts in start_patterns(len(values)):
            check(device, case, [[part[:size] for part in values]], [starts], first=size % 2)


@cases
def test_any_geometry(geometric_device, case):
    for size in (17, 40_000):
        values = row_of(case, size)
        for starts in start_patterns(len(values))[:2]:
            check(geometric_device, case, [values], [starts], first=size % 2)


@few
def test_one_launch_for_rows_of_all_sizes(device, case):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS)]
    with recorded(device) as journal:
        check(device, case, [row_of(case, size, seed=size) for size in sizes])
    assert [(record.name, record.num_rows) for record in journal.records] == [
        (f"local_{case[0]}", len(sizes) - 1)
    ]


@few
def test_large_rows_are_spread_over_threads(device, case):
    with spread(device) as num_jobs:
        check(device, case, [row_of(case, SPREAD_SIZE)], first=1)
    assert num_jobs == [NUM_THREADS]


def test_what_the_sum_held_is_not_read_by_the_first(device):
    values = row_of(("sgd", "float32", False), 40)
    values[1][:] = np.nan
    check(device, ("sgd", "float32", False), [values], first=1)


def test_each_dtype_is_a_launch_and_masters_are_another(device):
    kernel, scalars = kernel_of("momentum"), FORMULAS["momentum"][2]
    found = [case for case in CASES if case[0] == "momentum"]
    rows = [buffers(operands(device, row_of(case, 100))) for case in found * 2]
    with recorded(device) as journal:
        local_update(kernel, rows, first=0, scalars=scalars)
    assert journal.launches == len(found)


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        local_update(kernel_of("sgd"), [], first=1, scalars=(0.1,))
        check(device, CASES[0], [row_of(CASES[0], 0)])
    assert journal.launches == 0


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("float16", "float16", "float16"), "is no sum for gradients of"),
        (("float32", "float64", "float32"), "is no sum for gradients of"),
        (("float32", "float32", "float64"), "dtypes differ"),
        (("int32", "int32", "int32"), "float dtype"),
        (("float64", "float32", "float64", "float64"), "no float32 master"),
        (("float32", "float32"), "a row of 2 operands, not 3, or 4 with masters"),
    ],
)
def test_operands_that_do_not_fit_change_nothing(device, dtypes, message):
    good = operands(device, row_of(("sgd", "float64", False), 16))
    row = [Operand(device, random_data((16,), dtype)) for dtype in dtypes]
    with recorded(device) as journal, pytest.raises(ValueError, match=f"local_sgd: .*{message}"):
        local_update(kernel_of("sgd"), [buffers(good), buffers(row)], first=0, scalars=(0.1,))
    assert journal.launches == 0
    assert all(operand.unchanged() for operand in [*good, *row])


def test_overlaps_and_what_may_not_be_written_change_nothing(device):
    values = row_of(("momentum", "float32", False), 16)
    for place in range(len(values)):
        row = operands(device, values)
        for other in range(place):
            given = buffers(row)
            given[other] = given[place]
            with pytest.raises(ValueError, match="overlaps operand"):
                local_update(kernel_of("momentum"), [given], first=0, scalars=(0.1, 0.9))
        if place < len(values) - 1:
            row[place] = Operand(device, values[place], writable=False)
            with pytest.raises(ValueError, match="read-only"):
                local_update(kernel_of("momentum"), [buffers(row)], first=0, scalars=(0.1, 0.9))
        assert all(operand.unchanged() for operand in row)
