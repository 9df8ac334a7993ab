"""add_n in every implementation, against a plain reference, bit by bit."""

import pytest
from support.exact_data import same
from support.implementations import (
    blank,
    blank_values,
    buffers,
    operands,
    random_terms,
    start_patterns,
)
from support.meshes import one_device_sum
from support.row_body import SumBody

from gradreduce.device import as_dtype
from gradreduce.ops import add_n
from gradreduce.ops.add_n import ADD_N


class TestAddN(SumBody):
    name = "add_n"

    def row(self, case, size, seed=0, num_inputs=2):
        return [blank_values(size, case), *random_terms(num_inputs, size, case, seed=seed)]

    def launch(self, device, rows):
        add_n([row[0] for row in rows], [row[1:] for row in rows])

    def reference(self, case, row):
        return [one_device_sum(row[1:], out=row[0].dtype)]

    @pytest.mark.parametrize(("to", "of"), [("float32", "bfloat16"), ("complex128", "complex64")])
    def test_a_wider_out(self, device, to, of):
        for num_inputs in (1, 2, 9):
            terms = random_terms(num_inputs, 1003, of)
            self.check(device, of, [[blank_values(1003, to), *terms]])


@pytest.mark.parametrize("template", ADD_N.templates, ids=ADD_N.expression)
def test_every_template_and_its_cast(device, template):
    to, of, num_inputs = template
    for count in [num_inputs] if num_inputs else [1, 2, 11]:
        for starts in start_patterns(1 + count):
            terms = random_terms(count, 1003, of, seed=count)
            out = blank(device, 1003, to, starts[0])
            inputs = operands(device, terms, starts[1:])
            device.launch(ADD_N, template, [buffers([out, *inputs])], (count,))
            assert same(out.array, one_device_sum(terms, out=as_dtype(to)))
            assert out.contained()
            assert all(operand.unchanged() for operand in inputs)
