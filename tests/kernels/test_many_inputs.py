"""Tables that are not inline: a thousand inputs of one tensor, and many rows."""

import numpy as np
import pytest
from support.exact_data import finite_data, random_data, same
from support.implementations import (
    INLINE_ROWS,
    Operand,
    blank,
    buffers,
    recorded,
)
from support.meshes import hierarchical_sum, one_device_sum

from gradreduce.ops import accumulate_n, add_n, all_sum, divide

NUM_INPUTS = 1000
DTYPES = ["bfloat16", "float32", "complex64", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1])
def test_a_thousand_inputs(device, dtype, start):
    """One row that is longer than the inline table."""
    terms = list(finite_data((NUM_INPUTS, 37), dtype, seed=1))
    inputs = [Operand(device, term, start) for term in terms]
    outs = [Operand(device, terms[0], start) for _ in range(3)]
    out, total, mean = outs
    with recorded(device) as journal:
        add_n([out.buffer], [buffers(inputs)])
        accumulate_n([total.buffer], [buffers(inputs[1:])])
        all_sum([[mean.buffer]], [buffers(inputs)], 500)
    found = [(record.name, record.num_rows) for record in journal.records]
    assert found == [("add_n", 1), ("accumulate_n", 1), ("all_sum", 1)]
    assert same(out.array, one_device_sum(terms))
    assert same(total.array, one_device_sum(terms))
    assert same(mean.array, hierarchical_sum(terms))
    assert all(operand.contained() for operand in outs)
    assert all(operand.unchanged() for operand in inputs)


@pytest.mark.parametrize("num_rows", [INLINE_ROWS, INLINE_ROWS + 1])
def test_rows_that_just_fit_inline_and_one_more(device, num_rows):
    terms = [random_data((20,), "float32", seed=row) for row in range(num_rows)]
    outs = [blank(device, 20, "float32") for _ in terms]
    add_n(buffers(outs), [[device.adopt(term)] for term in terms])
    assert all(same(out.array, term) for out, term in zip(outs, terms, strict=True))


@pytest.mark.parametrize("call", [add_n, accumulate_n, all_sum, divide])
def test_lists_of_different_lengths_change_nothing(device, call):
    dtype = "int32" if call is divide else "float64"
    out, *terms = (Operand(device, np.ones(16, each)) for each in ("float64", dtype, dtype))
    outs = [[out.buffer]] if call is all_sum else [out.buffer]
    inputs = buffers(terms) if call is divide else [buffers(terms)] * 2
    with pytest.raises(ValueError, match="zip"):
        call(outs, inputs, *[3] * (call is divide))
    assert all(operand.unchanged() for operand in [out, *terms])
