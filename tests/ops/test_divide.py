"""divide in every implementation, against a plain reference, bit by bit."""

import numpy as np
import pytest
from support.exact_data import INTEGERS, random_data, same
from support.implementations import (
    Operand,
    blank,
    blank_values,
    operands,
    recorded,
    start_patterns,
)
from support.row_body import RowBody

from gradreduce.device import as_dtype
from gradreduce.ops import divide

LONG = [dtype for dtype in INTEGERS if dtype.itemsize == 8]


def out_of(dtype):
    """The expected dtype of a mean, defined independently of the library."""
    return np.dtype({1: "float32", 2: "float32", 4: "float64", 8: "float64"}[dtype.itemsize])


def reference(term, divisor=3):
    wide = out_of(term.dtype)
    with np.errstate(all="ignore"):
        return term.astype(wide) / wide.type(divisor)


def extremes(dtype):
    """The largest and smallest values, values near zero, and values that float64 rounds."""
    limits = np.iinfo(dtype)
    found = {limits.min, limits.min + 1, limits.max, limits.max - 1, -3, -1, 0, 1, 3}
    for power in (24, 31, 32, 53, 54, 55, 62, 63):  # ties to the even neighbour below and above
        for near in (-1, 0, 1):
            step = 2 ** max(0, power - 53)  # half the distance of two float64 there
            found |= {sign * (2**power + k * step + near) for k in range(8) for sign in (1, -1)}
    for near in (-1025, -1024, -1023, -513, -512, -511):  # near the middle to 2**64 or 2**63
        found |= {2**64 + near, 2**63 + near, -(2**63) - near}
    return [value for value in sorted(found) if limits.min <= value <= limits.max]


class TestDivide(RowBody):
    name = "divide"
    cases = INTEGERS
    few = tuple(map(as_dtype, ("int8", "uint16", "int64")))
    groups = ({"case": "int8"}, {"case": "uint8"}, {"case": "int64"}, {"case": "uint16"})

    def row(self, case, size, seed=0):
        return [blank_values(size, out_of(as_dtype(case))), random_data((size,), case, seed=seed)]

    def launch(self, device, rows, *, divisor=3):
        divide([out for out, _ in rows], [term for _, term in rows], divisor)

    def reference(self, case, row, *, divisor=3):
        return [reference(row[1], divisor)]

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    @pytest.mark.parametrize(
        "divisor",
        [0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-320, -1e-320, 1e300, 1e-30],
    )
    def test_any_divisor_is_as_ieee_has_it(self, device, dtype, divisor):
        ends = np.array(extremes(dtype), dtype)
        rows = [[blank_values(ends.size, out_of(dtype)), ends], self.row(dtype, 1003)]
        for starts in start_patterns(2):
            self.check(device, dtype, rows, [starts] * 2, divisor=divisor)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, -7, 10, 0.1, 2**24 + 1, 1e300])
def test_the_ends_of_the_range_are_rounded_once(device, dtype, divisor):
    """Compared with Python's numbers, whose conversion and division round to nearest.

    The quotient of two float32 may be rounded to float64 first: it has more than twice the bits.
    """
    values = extremes(dtype)
    term, wide = np.array(values, dtype), out_of(dtype)
    with np.errstate(over="ignore"):
        by = float(wide.type(divisor))
        expected = np.array([float(value) / by for value in values]).astype(wide)
    for starts in start_patterns(2):
        out, read = blank(device, term.size, wide, starts[0]), Operand(device, term, starts[1])
        divide([out.buffer], [read.buffer], divisor)
        assert same(out.array, expected)
        assert out.contained()


@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_in_place(device, dtype):
    """The mean may overwrite its sum if they have the same size."""
    for size in (1, 16, 1003, 40_003):
        for start in (0, 1):
            memory = Operand(device, random_data((size,), dtype), start)
            divide([memory.buffer.view(0, (size,), as_dtype("float64"))], [memory.buffer], 3)
            assert same(memory.array.view("float64"), reference(memory.values))
            assert memory.contained()


def test_equal_dtypes_are_one_launch_whichever_their_objects(device):
    other = np.dtype("int16").newbyteorder("=")
    assert other is not np.dtype("int16")
    terms = operands(device, [random_data((100,), "int16")] * 2)
    outs = [blank(device, 100, "float32") for _ in terms]
    inputs = [terms[0].buffer, terms[1].buffer.view(0, (100,), other)]
    with recorded(device) as journal:
        divide([out.buffer for out in outs], inputs, 3)
    assert [record.num_rows for record in journal.records] == [2]
    assert all(same(out.array, reference(terms[0].values)) for out in outs)
