"""pack in every implementation, against a plain reference, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import COMPLEX, DTYPES, FLOATS, random_data, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SIZES,
    SPLIT_SIZE,
    Operand,
    accumulate_dtype_of,
    blank,
    counted_threads,
    random_terms,
    recorded,
    start_patterns,
)

from gradreduce.device import as_dtype, flat_layout
from gradreduce.ops import pack
from gradreduce.ops.pack import PACK

GAPS = (0, 1, 7, 16, 40_000)


def reference(term, gap=0, divisor=1, out=None):
    filled = term
    if divisor != 1:
        wide = accumulate_dtype_of(term.dtype)
        parts = term.astype(wide)
        parts = parts.view(parts.real.dtype)  # divides real and imaginary parts separately
        with np.errstate(all="ignore"):
            filled = (parts / parts.dtype.type(divisor)).view(wide)
    with np.errstate(all="ignore"):
        if out is not None and (filled.itemsize, out.itemsize) == (8, 2):
            filled = filled.astype("float32")  # double is converted to float16 through float32
        filled = filled.astype(out or term.dtype)
    return np.concatenate([filled, np.zeros(gap, filled.dtype)])


def check(device, terms, gaps, divisor=1, starts=None):
    """Packs every term in one call, and checks every byte."""
    starts = starts or [(0, 0)] * len(terms)
    outs, inputs = [], []
    for term, gap, (to, of) in zip(terms, gaps, starts, strict=True):
        outs.append(blank(device, term.size + gap, term.dtype, to))
        inputs.append(Operand(device, term, of))
    pack([out.buffer for out in outs], [row.buffer for row in inputs], divisor=divisor)
    for out, operand, term, gap in zip(outs, inputs, terms, gaps, strict=True):
        assert same(out.array, reference(term, gap, divisor)), (out.buffer, gap, divisor, starts)
        assert out.contained()
        assert operand.unchanged()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_gap_and_start(device, dtype):
    term = random_data((max(SIZES),), dtype)
    for size in SIZES:
        for gap in GAPS if size < 16_383 else GAPS[:4]:
            for starts in start_patterns(2):
                check(device, [term[:size]], [gap], starts=[starts])


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
@pytest.mark.parametrize(
    "divisor", [1, -1, 0.5, 1 / 3, 0, -0.0, 1e-320, float("inf"), float("nan")]
)
def test_the_values_are_divided_and_the_gap_is_not(device, dtype, divisor):
    """The gap contains 0.0, for any divisor, and never -0.0 or NaN."""
    for size, gap in ((0, 5), (5, 3), (1003, 21), (16, 32)):
        for starts in start_patterns(2):
            check(device, [random_data((size,), dtype)], [gap], divisor, [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    divisor = 1 if dtype.kind in "iu" else -3
    for size in (1, 17, 255, 16_385, 40_000):
        for gap in (0, 5, 700) if size < 1000 else (5,):
            for starts in start_patterns(2)[:2]:
                check(geometric_device, [random_data((size,), dtype)], [gap], divisor, [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(device, dtype):
    """The out may be the input, also if it is longer."""
    divisor = 1 if dtype.kind in "iu" else -3
    for gap in (0, 5, 40_000):
        values = random_data((20_003 + gap,), dtype)
        memory = Operand(device, values)
        pack([memory.buffer], [memory.buffer.view(0, (20_003,))], divisor=divisor)
        assert same(memory.array, reference(values[:20_003], gap, divisor))
        assert memory.contained()


def test_an_empty_input_may_lie_anywhere_in_the_out(device):
    memory = Operand(device, random_data((16,), "float32"))
    for start in (0, 7, 16):
        pack([memory.buffer], [memory.buffer.view(start, (0,))])
        assert same(memory.array, np.zeros(16, "float32"))
        assert memory.contained()


def test_a_flat_buffer_and_back(device):
    """Each tensor starts at a vector boundary, with zeros after it; unpacking swaps the rows."""
    sizes = [5, 0, 16, 1, 40_000, 3]
    layout = flat_layout(sizes, 4)
    flat = blank(device, layout.size, "float32")
    terms = [Operand(device, random_data((size,), "float32", seed=size)) for size in sizes]
    places = list(zip(layout.offsets, layout.spans, strict=True))
    pack([flat.buffer.view(at, (span,)) for at, span in places], [term.buffer for term in terms])
    gaps = [span - size for span, size in zip(layout.spans, sizes, strict=True)]
    expected = [reference(term.values, gap) for term, gap in zip(terms, gaps, strict=True)]
    assert same(flat.array, np.concatenate(expected))

    back = [blank(device, size, "float32") for size in sizes]
    inputs = [
        flat.buffer.view(offset, (size,))
        for offset, size in zip(layout.offsets, sizes, strict=True)
    ]
    pack([out.buffer for out in back], inputs)
    for out, term in zip(back, terms, strict=True):
        assert same(out.array, term.values)
        assert out.contained()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        terms = [random_data((size,), dtype, seed=size) for size in sizes[:num_rows]]
        gaps = [row % 4 for row in range(num_rows)]
        starts = [(row % 3, row % 2) for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, terms, gaps, starts=starts)
        assert journal.launches == 1
        written = [size + gap for size, gap in zip(sizes, gaps, strict=False)]
        assert journal.records[0].num_rows == sum(size > 0 for size in written)


def test_a_thousand_tiny_rows_are_one_launch(device):
    terms = [random_data((1 + row % 5,), "float32", seed=row) for row in range(1000)]
    with recorded(device) as journal:
        check(device, terms, [row % 3 for row in range(1000)], -3)
    assert [(record.name, record.num_rows) for record in journal.records] == [("pack", 1000)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "uint8"])
def test_large_rows_are_spread_over_threads(device, dtype):
    with counted_threads(device) as num_jobs:
        for starts in start_patterns(2):
            check(device, [random_data((SPLIT_SIZE,), dtype)], [9], starts=[starts])
        sizes = (SPLIT_SIZE // 2, 5, SPLIT_SIZE)
        check(device, [random_data((size,), dtype) for size in sizes], [SPLIT_SIZE, 0, 1])
    assert num_jobs == [NUM_THREADS] * 5


@pytest.mark.parametrize("template", PACK.templates, ids=PACK.expression)
def test_every_template_and_its_cast(device, template):
    to, of = map(as_dtype, template)
    for divisor in (1,) if of.kind == "u" else (1, -1 / 3):
        for to_start, of_start in start_patterns(2):
            for size in (1003, 16, 3):
                term = Operand(device, random_data((size,), of), of_start)
                out = blank(device, size + 9, to, to_start)
                pack([out.buffer], [term.buffer], divisor=divisor)
                assert same(out.array, reference(term.values, 9, divisor, to))
                assert out.contained()
                assert term.unchanged()


@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_a_double_is_rounded_to_a_float_on_its_way_to_a_half(device, out):
    """It is above the middle of two float16 by less than float32 resolves: rounds to even."""
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[out]
    above = np.full(40, 1 + unit / 2 + 2.0**-40)
    halves = blank(device, above.size, as_dtype(out))
    pack([halves.buffer], [Operand(device, above).buffer])
    assert same(halves.array, np.ones(above.size, as_dtype(out)))


def test_complex_terms_of_a_wider_out(device):
    term, out = (
        Operand(device, random_data((1003,), "complex64")),
        blank(device, 1010, "complex128"),
    )
    pack([out.buffer], [term.buffer], divisor=3)
    assert same(out.array, reference(term.values, 7, 3, as_dtype("complex128")))


def test_each_dtype_is_a_launch_of_its_own(device):
    terms = [
        random_data((100,), dtype) for _ in range(3) for dtype in ("float32", "int32", "float16")
    ]
    with recorded(device) as journal:
        check(device, terms, [2] * 9)
    assert journal.launches == 3


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        pack([], [])
        check(device, random_terms(3, 0, "float32"), [0, 0, 0])
    assert journal.launches == 0


def test_an_input_may_be_read_only(device):
    term = Operand(device, random_data((1003,), "float32"), writable=False)
    out = blank(device, 1005, "float32")
    pack([out.buffer], [term.buffer])
    assert same(out.array, reference(term.values, 2))


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 40), st.integers(0, 40_000)),  # size
            st.one_of(st.integers(0, 5), st.integers(0, 20_000)),  # gap
            st.integers(0, 3),  # starts
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_many_rows_are_as_one_launch_each(device, dtype, rows):
    terms = [
        Operand(device, random_data((size,), dtype, seed=size), start) for size, _, _, start in rows
    ]
    together, alone = (
        [blank(device, size + gap, dtype, start) for size, gap, start, _ in rows] for _ in range(2)
    )
    pack([out.buffer for out in together], [term.buffer for term in terms])
    for out, term in zip(alone, terms, strict=True):
        pack([out.buffer], [term.buffer])
    for out, other in zip(together, alone, strict=True):
        assert same(out.array, other.array)
        assert out.contained()
