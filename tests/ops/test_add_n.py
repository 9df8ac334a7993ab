"""add_n in every implementation, against a plain reference, bit by bit."""

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
    blank,
    buffers,
    counted_threads,
    operands,
    random_terms,
    recorded,
    start_patterns,
)

from gradreduce.device import as_dtype
from gradreduce.ops import add_n
from gradreduce.ops.add_n import ADD_N


def reference(terms, out=None):
    wide = accumulate_dtype_of(terms[0].dtype)
    with np.errstate(all="ignore"):
        total = terms[0].astype(wide)
        for term in terms[1:]:
            total = total + term.astype(wide)
        return total.astype(out or terms[0].dtype)


def check(device, rows, starts=None):
    """Adds every row in one call, and checks every byte."""
    outs, inputs = [], []
    for terms, row in zip(rows, starts or [None] * len(rows), strict=True):
        row = row or [0] * (1 + len(terms))
        outs.append(blank(device, terms[0].size, terms[0].dtype, row[0]))
        inputs.append(operands(device, terms, row[1:]))
    add_n(buffers(outs), [buffers(row) for row in inputs])
    for out, row, terms in zip(outs, inputs, rows, strict=True):
        assert same(out.array, reference(terms)), (out.buffer, starts)
        assert out.contained()
        assert all(operand.unchanged() for operand in row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_and_start(device, dtype):
    for num_inputs in (1, 2, 5):
        terms = random_terms(num_inputs, max(SIZES), dtype)
        for size in SIZES:
            for starts in start_patterns(1 + num_inputs):
                check(device, [[term[:size] for term in terms]], [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_inputs(device, dtype):
    for num_inputs in range(1, 21):
        check(device, [random_terms(num_inputs, 1003, dtype, seed=num_inputs)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    for size, num_inputs in ((1, 2), (17, 9), (255, 2), (255, 9), (16_385, 9), (40_000, 2)):
        for starts in start_patterns(1 + num_inputs)[:2]:
            check(geometric_device, [random_terms(num_inputs, size, dtype)], [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_any_input(device, dtype):
    for num_inputs in (1, 2, 3, 8, 9):
        terms = random_terms(num_inputs, 20_003, dtype)
        for place in range(num_inputs):
            inputs = operands(device, terms)
            out = inputs[place].buffer
            add_n([out.view(0, out.shape)], [buffers(inputs)])
            assert same(inputs[place].array, reference(terms))
            assert inputs[place].contained()
            assert all(inputs[k].unchanged() for k in range(num_inputs) if k != place)


@pytest.mark.parametrize("num_inputs", [2, 3, 8, 9])
def test_one_input_may_come_twice_and_be_the_out(device, num_inputs):
    terms = random_terms(num_inputs, 20_003, as_dtype("float32"))
    terms[-1] = terms[0]
    inputs = operands(device, terms[:-1])
    row = [*buffers(inputs), inputs[0].buffer]
    add_n([inputs[0].buffer], [row])
    assert same(inputs[0].array, reference(terms))


def test_neighbours_do_not_overlap(device):
    memory = Operand(device, random_data((48,), "float32"))
    out, left, right = (memory.buffer.view(start, (16,)) for start in (16, 0, 32))
    add_n([out], [[left, right]])
    expected = memory.values.copy()
    expected[16:32] = reference([memory.values[:16], memory.values[32:]])
    assert same(memory.array, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        rows = [random_terms(2, size, dtype, seed=size) for size in sizes[:num_rows]]
        starts = [[row % 3, row % 2, 0] for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, rows, starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device):
    with recorded(device) as journal:
        check(device, [random_terms(3, 1 + row % 5, "float32", seed=row) for row in range(1000)])
    assert [(record.name, record.num_rows) for record in journal.records] == [("add_n", 1000)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "uint8"])
def test_large_rows_are_spread_over_threads(device, dtype):
    with counted_threads(device) as num_jobs:
        for starts in ([0, 0, 0, 0], [0, 1, 2, 3]):
            check(device, [random_terms(3, SPLIT_SIZE, dtype)], [starts])
        check(
            device,
            [random_terms(2, size, dtype) for size in (SPLIT_SIZE // 2, 5, SPLIT_SIZE)],
        )
    assert num_jobs == [NUM_THREADS] * 3


@pytest.mark.parametrize("template", ADD_N.templates, ids=ADD_N.expression)
def test_every_template_and_its_cast(device, template):
    to, of, num_inputs = template
    for count in [num_inputs] if num_inputs else [1, 2, 11]:
        for starts in start_patterns(1 + count):
            terms = random_terms(count, 1003, of, seed=count)
            out = blank(device, 1003, to, starts[0])
            inputs = operands(device, terms, starts[1:])
            device.launch(ADD_N, template, [buffers([out, *inputs])], (count,))
            assert same(out.array, reference(terms, as_dtype(to)))
            assert out.contained()
            assert all(operand.unchanged() for operand in inputs)


@pytest.mark.parametrize(("to", "of"), [("float32", "bfloat16"), ("complex128", "complex64")])
@pytest.mark.parametrize("num_inputs", [1, 2, 9])
def test_a_wider_out(device, to, of, num_inputs):
    terms = random_terms(num_inputs, 1003, of)
    out = blank(device, 1003, to)
    add_n([out.buffer], [buffers(operands(device, terms))])
    assert same(out.array, reference(terms, as_dtype(to)))


def test_each_dtype_and_number_of_inputs_is_a_launch_of_its_own(device):
    rows = [
        random_terms(num_inputs, 100, dtype)
        for _ in range(3)
        for dtype, num_inputs in [("float32", 2), ("float32", 3), ("float16", 2), ("int32", 2)]
    ]
    with recorded(device) as journal:
        check(device, rows)
    assert journal.launches == 4


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        add_n([], [])
        check(device, [random_terms(2, 0, "float32")] * 3)
    assert journal.launches == 0


def test_lists_of_different_lengths_change_nothing(device):
    row = operands(device, random_terms(2, 16, "float32"))
    with pytest.raises(ValueError, match="zip"):
        add_n(buffers(row[:1]), [buffers(row), buffers(row)])
    assert all(operand.unchanged() for operand in row)


def test_inputs_may_be_read_only(device):
    terms = random_terms(3, 1003, "float32")
    out = blank(device, 1003, "float32")
    inputs = [Operand(device, term, writable=False) for term in terms]
    add_n([out.buffer], [buffers(inputs)])
    assert same(out.array, reference(terms))


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_inputs=st.integers(1, 10),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 5), min_size=11, max_size=11),
)
def test_many_rows_are_as_one_launch_each(device, dtype, num_inputs, sizes, starts):
    rows = [random_terms(num_inputs, size, dtype, seed=size) for size in sizes]
    together = [blank(device, size, dtype, starts[0]) for size in sizes]
    alone = [blank(device, size, dtype, starts[0]) for size in sizes]
    inputs = [operands(device, terms, starts[1 : 1 + num_inputs]) for terms in rows]
    add_n(buffers(together), [buffers(row) for row in inputs])
    for one, row in zip(alone, inputs, strict=True):
        add_n([one.buffer], [buffers(row)])
    for one, other in zip(together, alone, strict=True):
        assert same(one.array, other.array)
        assert one.contained()
