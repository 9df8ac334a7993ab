"""accumulate_n in every implementation, against a plain reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import DTYPES, random_data, same
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

from gradreduce.device import as_dtype
from gradreduce.ops import accumulate_n
from gradreduce.ops.accumulate_n import ACCUMULATE_N


def reference(total, terms):
    """Adds in the accumulate type of the total, to which every term is cast, total first."""
    wide = accumulate_dtype_of(total.dtype)
    with np.errstate(all="ignore"):
        running = total.astype(wide)
        for term in terms:
            running = running + term.astype(wide)
        return running.astype(total.dtype)


def check(device, rows, starts=None):
    """Adds to every row's first array in one call, and checks every byte."""
    made = [
        operands(device, row, places)
        for row, places in zip(rows, starts or [None] * len(rows), strict=True)
    ]
    accumulate_n([row[0].buffer for row in made], [buffers(row[1:]) for row in made])
    for (total, *inputs), (before, *terms) in zip(made, rows, strict=True):
        assert same(total.array, reference(before, terms)), (total.buffer, starts)
        assert total.contained()
        assert all(operand.unchanged() for operand in inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_and_start(device, dtype):
    for num_inputs in (1, 2, 5):
        terms = random_terms(1 + num_inputs, max(SIZES), dtype)
        for size in SIZES:
            for starts in start_patterns(1 + num_inputs):
                check(device, [[term[:size] for term in terms]], [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_inputs(device, dtype):
    for num_inputs in range(1, 21):
        check(device, [random_terms(1 + num_inputs, 1003, dtype, seed=num_inputs)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    for size in (1, 17, 255, 16_385, 40_000):
        for starts in start_patterns(4)[:2]:
            check(geometric_device, [random_terms(4, size, dtype)], [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_input_may_be_the_total(device, dtype):
    """The value that it had before the launch is added."""
    for num_inputs in (1, 2, 3, 9):
        terms = random_terms(num_inputs, 20_003, dtype)
        for place in range(num_inputs):
            inputs = operands(device, terms)
            total = inputs[place].buffer
            accumulate_n([total.view(0, total.shape)], [buffers(inputs)])
            assert same(inputs[place].array, reference(terms[place], terms))
            assert inputs[place].contained()
            assert all(inputs[k].unchanged() for k in range(num_inputs) if k != place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        rows = [random_terms(3, size, dtype, seed=size) for size in sizes[:num_rows]]
        starts = [[row % 3, row % 2, 0] for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, rows, starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device):
    with recorded(device) as journal:
        check(device, [random_terms(2, 1 + row % 5, "float32", seed=row) for row in range(1000)])
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("accumulate_n", 1000)
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "uint8"])
def test_large_rows_are_spread_over_threads(device, dtype):
    with counted_threads(device) as num_jobs:
        for starts in ([0, 0, 0], [0, 1, 2]):
            check(device, [random_terms(3, SPLIT_SIZE, dtype)], [starts])
        check(
            device,
            [random_terms(2, size, dtype) for size in (SPLIT_SIZE // 2, 5, SPLIT_SIZE)],
        )
    assert num_jobs == [NUM_THREADS] * 3


@pytest.mark.parametrize("template", ACCUMULATE_N.templates, ids=ACCUMULATE_N.expression)
def test_every_template_and_its_cast(device, template):
    to, of = map(as_dtype, template)
    for num_inputs in (1, 2, 9):
        for starts in start_patterns(1 + num_inputs):
            terms = random_terms(num_inputs, 1003, of, seed=num_inputs)
            values = [random_data((1003,), to, seed=99), *terms]
            total, *inputs = operands(device, values, starts)
            accumulate_n([total.buffer], [buffers(inputs)])
            assert same(total.array, reference(total.values, terms))
            assert total.contained()
            assert all(operand.unchanged() for operand in inputs)


def test_complex_terms_of_a_wider_total(device):
    terms = random_terms(2, 1003, "complex64")
    total, *inputs = operands(device, [random_data((1003,), "complex128", seed=99), *terms])
    accumulate_n([total.buffer], [buffers(inputs)])
    assert same(total.array, reference(total.values, terms))


def test_each_dtype_and_number_of_inputs_is_a_launch_of_its_own(device):
    rows = [
        random_terms(num_operands, 100, dtype)
        for _ in range(3)
        for dtype, num_operands in [("float32", 2), ("float32", 3), ("float16", 2), ("int32", 2)]
    ]
    with recorded(device) as journal:
        check(device, rows)
    assert journal.launches == 4


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        accumulate_n([], [])
        check(device, [random_terms(2, 0, "float32")] * 3)
    assert journal.launches == 0


def test_lists_of_different_lengths_change_nothing(device):
    row = operands(device, random_terms(2, 16, "float32"))
    with pytest.raises(ValueError, match="zip"):
        accumulate_n(buffers(row[:1]), [buffers(row), buffers(row)])
    assert all(operand.unchanged() for operand in row)


def test_inputs_may_be_read_only(device):
    before, *terms = random_terms(3, 1003, "float32")
    total = Operand(device, before)
    accumulate_n([total.buffer], [[Operand(device, t, writable=False).buffer for t in terms]])
    assert same(total.array, reference(before, terms))


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_inputs=st.integers(1, 10),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 5), min_size=11, max_size=11),
)
def test_many_rows_are_as_one_launch_each(device, dtype, num_inputs, sizes, starts):
    together, alone = (
        [
            operands(
                device,
                random_terms(1 + num_inputs, size, dtype, seed=size),
                starts[: 1 + num_inputs],
            )
            for size in sizes
        ]
        for _ in range(2)
    )
    accumulate_n([row[0].buffer for row in together], [buffers(row[1:]) for row in together])
    for total, *inputs in alone:
        accumulate_n([total.buffer], [buffers(inputs)])
    for row, other in zip(together, alone, strict=True):
        assert same(row[0].array, other[0].array)
        assert row[0].contained()
