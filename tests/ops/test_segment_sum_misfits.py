"""What ``segment_sum`` refuses, before it has changed anything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ops.test_segment_sum import INDICES, Rows, sums
from support.exact_data import random_data, same
from support.implementations import Operand, recorded, segment_sum

from gradreduce.ops import plan_segments

PLAN = plan_segments(INDICES % 11)
OUT, ARRAY, TERM = ("float32", (5, 3)), ("float32", (9, 3)), ("float32", (10, 3))
INTEGER_OUT, INTEGER_TERM = ("int32", (5, 3)), ("int32", (10, 3))
# out, values, options
MISFITS = {
    "more rows than the plan": (OUT, ("float32", (11, 3)), {}),
    "fewer": (OUT, ("float32", (9, 3)), {}),
    "no rows at all": (OUT, ("float32", ()), {}),
    "an out without rows": (("float32", ()), ("float32", (10, 1)), {}),
    "another width": (OUT, ("float32", (10, 4)), {}),
    "too many rows of the out": (("float32", (6, 3)), TERM, {}),
    "too few": (("float32", (4, 3)), TERM, {}),
    "a cast that there is not": (OUT, INTEGER_TERM, {}),
    "two halves": (("bfloat16", (5, 3)), ("float16", (10, 3)), {}),
    "complex and real": (("complex64", (5, 3)), TERM, {}),
    "integers divided": (INTEGER_OUT, INTEGER_TERM, {"divisor": 2}),
    "integers divided one by one": (INTEGER_OUT, INTEGER_TERM, {"divisor": [1, np.ones(5)]}),
    "too few divisors": (OUT, TERM, {"divisor": [1, np.ones(4)]}),
    "divisors of another dtype": (OUT, TERM, {"divisor": [1, np.ones(5, "float32")]}),
    "into too few": (ARRAY, TERM, {"into": [None, np.arange(4)]}),
    "into twice": (ARRAY, TERM, {"into": [None, np.array([0, 1, 1, 2, 3])]}),
    "into twice, unsorted": (ARRAY, TERM, {"into": [None, np.array([4, 1, 2, 1, 0])]}),
    "into one that is added to": (ARRAY, TERM, {"into": [None, np.arange(-1, 4)]}),
    "into below": (ARRAY, TERM, {"into": [None, np.array([0, 1, ~9, 2, 3])]}),
    "into beyond": (ARRAY, TERM, {"into": [None, np.arange(5, 10)]}),
    "into of another dtype": (ARRAY, TERM, {"into": [None, np.arange(5, dtype="int32")]}),
}


@pytest.mark.parametrize(("out", "term", "options"), MISFITS.values(), ids=MISFITS)
def test_arguments_that_do_not_fit_change_nothing(device, out, term, options):
    good = Rows(device, random_data((INDICES.size, 3), "float64"), INDICES)
    row = [Operand(device, random_data((math.prod(shape),), dtype)) for dtype, shape in (out, term)]
    views = [one.buffer.view(0, shape) for one, (_, shape) in zip(row, (out, term), strict=True)]
    with recorded(device) as journal, pytest.raises(ValueError, match="segment_sum"):
        segment_sum([good.out, views[0]], [good.buffer, views[1]], [good.plan, PLAN], **options)
    assert journal.records == []
    assert all(operand.unchanged() for operand in [*row, good.term, good.made])


@pytest.mark.parametrize("start", [1, 14, 15, 30, 44])
def test_an_out_that_shares_memory_with_its_values_is_refused(device, start):
    memory = Operand(device, random_data((60,), "float32"))
    values, out = memory.buffer.view(15, (10, 3)), memory.buffer.view(start, (5, 3))
    with recorded(device) as journal, pytest.raises(ValueError, match=r"segment_sum: .*overlaps"):
        segment_sum([out], [values], [PLAN])
    assert journal.records == []
    assert memory.unchanged()


def test_an_out_beside_its_values_is_not(device):
    memory = Operand(device, random_data((60,), "float32"))
    for start in (0, 45):
        out = memory.buffer.view(start, (5, 3))
        segment_sum([out], [memory.buffer.view(15, (10, 3))], [PLAN])
        expected = sums(memory.values[15:45].reshape(10, 3), INDICES % 11)
        assert same(out.numpy(), expected)


def test_lists_of_different_lengths_change_nothing(device):
    one = Rows(device, random_data((INDICES.size, 3), "float32"), INDICES)
    whole = [one.out], [one.buffer], [one.plan]
    for place in range(3):
        lists = [part * (1 + (position == place)) for position, part in enumerate(whole)]
        with pytest.raises(ValueError, match="zip"):
            segment_sum(*lists)
    for options in ({"into": []}, {"divisor": []}):
        with pytest.raises(ValueError, match="zip"):
            segment_sum(*whole, **options)
    assert one.made.unchanged()


def test_an_input_may_be_read_only_and_an_out_may_not(device):
    values = random_data((30,), "float32")
    fixed = Operand(device, values, writable=False)
    one = Rows(device, values.reshape(10, 3), INDICES % 11)
    segment_sum([one.out], [fixed.buffer.view(0, (10, 3))], [one.plan])
    assert one.right()
    other = Rows(device, values.reshape(10, 3), INDICES % 11)
    with recorded(device) as journal, pytest.raises(ValueError, match="read-only"):
        segment_sum([other.out, fixed.buffer.view(0, (5, 3))], [one.buffer] * 2, [one.plan] * 2)
    assert journal.records == []
    assert other.made.unchanged()
