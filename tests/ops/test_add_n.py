"""add_n in every implementation, against a plain reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import DTYPES, random_data, same
from support.implementations import (
    Operand,
    accumulate_dtype_of,
    blank,
    blank_values,
    buffers,
    operands,
    random_terms,
    start_patterns,
)
from support.row_body import RowBody

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


class TestAddN(RowBody):
    cases = DTYPES
    few = tuple(map(as_dtype, ("float16", "complex64", "uint8")))
    groups = (
        {"case": "float32"},
        {"case": "float32", "num_inputs": 3},
        {"case": "float16"},
        {"case": "int32"},
    )

    def name_of(self, case):
        return "add_n"

    def row(self, case, size, seed=0, num_inputs=2):
        return [blank_values(size, case), *random_terms(num_inputs, size, case, seed=seed)]

    def launch(self, device, rows):
        add_n([row[0] for row in rows], [row[1:] for row in rows])

    def reference(self, case, row):
        return [reference(row[1:], row[0].dtype)]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_number_of_inputs(self, device, dtype):
        for num_inputs in range(1, 21):
            self.check(device, dtype, [self.row(dtype, 1003, num_inputs, num_inputs)])

    @pytest.mark.parametrize(("to", "of"), [("float32", "bfloat16"), ("complex128", "complex64")])
    def test_a_wider_out(self, device, to, of):
        for num_inputs in (1, 2, 9):
            terms = random_terms(num_inputs, 1003, of)
            self.check(device, of, [[blank_values(1003, to), *terms]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_any_input(device, dtype):
    """Some terms are added twice."""
    for num_inputs in (1, 2, 3, 9):
        terms = random_terms(num_inputs, 17_003, dtype)
        for place in range(num_inputs):
            inputs = operands(device, terms)
            out = inputs[place].buffer
            add_n([out.view(0, out.shape)], [buffers([*inputs, *inputs[:2]])])
            assert same(inputs[place].array, reference([*terms, *terms[:2]]))
            assert inputs[place].contained()
            assert all(inputs[k].unchanged() for k in range(num_inputs) if k != place)


def test_neighbours_do_not_overlap(device):
    memory = Operand(device, random_data((48,), "float32"))
    out, left, right = (memory.buffer.view(start, (16,)) for start in (16, 0, 32))
    add_n([out], [[left, right]])
    expected = memory.values.copy()
    expected[16:32] = reference([memory.values[:16], memory.values[32:]])
    assert same(memory.array, expected)


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
