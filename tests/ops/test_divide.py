"""divide in every implementation, against a plain reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import INTEGERS, random_data, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPLIT_SIZE,
    Operand,
    blank,
    counted_threads,
    operands,
    recorded,
    start_patterns,
)

from gradreduce.device import as_dtype
from gradreduce.ops import divide
from gradreduce.ops.divide import DIVIDE

LONG = [dtype for dtype in INTEGERS if dtype.itemsize == 8]


def out_of(dtype):
    """The expected dtype of a mean, defined independently of the library."""
    return np.dtype({1: "float32", 2: "float32", 4: "float64", 8: "float64"}[dtype.itemsize])


def reference(term, divisor=3):
    wide = out_of(term.dtype)
    with np.errstate(all="ignore"):
        return term.astype(wide) / wide.type(divisor)


def check(device, terms, divisor=3, starts=None):
    """Divides every term in one call, and checks every byte."""
    starts = starts or [(0, 0)] * len(terms)
    outs, inputs = [], []
    for term, (to, of) in zip(terms, starts, strict=True):
        outs.append(blank(device, term.size, out_of(term.dtype), to))
        inputs.append(Operand(device, term, of))
    divide([out.buffer for out in outs], [row.buffer for row in inputs], divisor)
    for out, operand, term in zip(outs, inputs, terms, strict=True):
        assert same(out.array, reference(term, divisor)), (out.buffer, divisor, starts)
        assert out.contained()
        assert operand.unchanged()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_size_and_start(device, dtype):
    term = random_data((max(SIZES),), dtype)
    for size in SIZES:
        for starts in start_patterns(2):
            check(device, [term[:size]], starts=[starts])


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


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_signed_integers_are_divided_by_their_value(device, bits):
    """The same bytes have two different means."""
    signed, unsigned = np.array([-1, 5], f"int{bits}"), np.array([-1, 5], f"int{bits}")
    unsigned = unsigned.view(f"uint{bits}")
    check(device, [signed, unsigned], 4)
    out = blank(device, 2, out_of(signed.dtype))
    divide([out.buffer], [device.adopt(signed)], 4)
    assert out.array.tolist() == [-0.25, 1.25]
    divide([out.buffer], [device.adopt(unsigned)], 4)
    assert out.array.tolist() == [float(out.array.dtype.type(2**bits - 1)) / 4, 1.25]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    "divisor", [0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-320, -1e-320, 1e300, 1e-30]
)
def test_any_divisor_is_as_ieee_has_it(device, dtype, divisor):
    term = np.concatenate([np.array(extremes(dtype), dtype), random_data((1003,), dtype)])
    for starts in start_patterns(2):
        check(device, [term], divisor, [starts])


def test_zeros_have_signs_and_zero_by_zero_is_nan(device):
    out, term = blank(device, 4, "float64"), Operand(device, np.array([0, 0, 1, -1], "int32"))
    divide([out.buffer], [term.buffer], -2)
    assert np.signbit(out.array).tolist() == [True, True, True, False]
    divide([out.buffer], [term.buffer], -0.0)
    assert np.isnan(out.array[:2]).all()
    assert out.array[2:].tolist() == [-np.inf, np.inf]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_any_geometry(geometric_device, dtype):
    for size in (1, 17, 255, 16_385, 40_000):
        for starts in start_patterns(2)[:2]:
            check(geometric_device, [random_data((size,), dtype)], -3, [starts])


@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_in_place(device, dtype):
    """The mean may overwrite its sum if they have the same size."""
    for size in (1, 16, 1003, 40_003):
        for start in (0, 1):
            memory = Operand(device, random_data((size,), dtype), start)
            divide([memory.buffer.view(0, (size,), as_dtype("float64"))], [memory.buffer], 3)
            assert same(memory.array.view("float64"), reference(memory.values))
            assert memory.contained()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        terms = [random_data((size,), dtype, seed=size) for size in sizes[:num_rows]]
        starts = [(row % 3, row % 2) for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, terms, starts=starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device):
    terms = [random_data((1 + row % 5,), "int16", seed=row) for row in range(1000)]
    with recorded(device) as journal:
        check(device, terms)
    assert [(record.name, record.num_rows) for record in journal.records] == [("divide", 1000)]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_large_rows_are_spread_over_threads(device, dtype):
    with counted_threads(device) as num_jobs:
        for starts in start_patterns(2):
            check(device, [random_data((SPLIT_SIZE,), dtype)], starts=[starts])
        sizes = (SPLIT_SIZE // 2, 5, SPLIT_SIZE)
        check(device, [random_data((size,), dtype) for size in sizes])
    assert num_jobs == [NUM_THREADS] * 5


def test_there_is_a_template_for_every_integer_and_no_other():
    expected = [(out_of(dtype).name, dtype.name) for dtype in INTEGERS]
    assert sorted(DIVIDE.templates) == sorted(expected)


def test_each_dtype_is_a_launch_of_its_own(device):
    """Signed and unsigned dtypes are separate launches too."""
    kinds = ("int8", "uint8", "int64", "uint16")
    with recorded(device) as journal:
        check(device, [random_data((100,), kind) for _ in range(3) for kind in kinds])
    assert journal.launches == 4


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


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        divide([], [], 3)
        check(device, [np.zeros(0, "int32")] * 3)
    assert journal.launches == 0


def test_lists_of_different_lengths_change_nothing(device):
    out, *terms = (Operand(device, np.ones(16, dtype)) for dtype in ("float64", "int32", "int32"))
    with pytest.raises(ValueError, match="zip"):
        divide([out.buffer], [term.buffer for term in terms], 3)
    assert all(operand.unchanged() for operand in [out, *terms])


def test_an_input_may_be_read_only(device):
    term = Operand(device, random_data((1003,), "int16"), writable=False)
    out = blank(device, 1003, "float32")
    divide([out.buffer], [term.buffer], 3)
    assert same(out.array, reference(term.values))


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(INTEGERS),
    divisor=st.one_of(st.integers(1, 64), st.floats()),
    rows=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 40), st.integers(0, 40_000)),  # size
            st.integers(0, 3),  # starts
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_any_rows_by_any_divisor(device, dtype, divisor, rows):
    terms = [random_data((size,), dtype, seed=size) for size, _, _ in rows]
    check(device, terms, divisor, [starts for _, *starts in rows])
