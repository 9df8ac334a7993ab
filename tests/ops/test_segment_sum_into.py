"""Sums added to what rows hold: ``~row`` in ``into`` of segment_sum, in every implementation."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import DTYPES, random_data, same
from support.implementations import (
    Operand,
    accumulate_dtype_of,
    recorded,
    segment_sum,
    start_patterns,
)

from gradreduce.device import as_dtype
from gradreduce.ops import plan_segments, segment_sum_command
from gradreduce.ops.segment_sum import SEGMENT_SUM

INDICES = np.array([3, 9, 3, 0, 3, 9, 5, 2**40, 0, 3])  # five segments
# Rows of the out that are added to (~) or overwritten, in no order; rows 4 and 6 are not used.
MIXED = np.array([~5, 2, ~0, 1, ~3])
WIDTHS = (1, 3, 8, 16, 17, 64)


def combined(out, values, into, divisor=1):
    """Computes the whole out in a plain loop."""
    wide, total = accumulate_dtype_of(values.dtype), out.copy()
    with np.errstate(all="ignore"):
        for index, place in zip(np.unique(INDICES), into, strict=True):
            first, *rest = values[index == INDICES].astype(wide)
            row = first
            for term in rest:
                row = row + term
            if divisor != 1:
                row = (row.view(row.real.dtype) / row.real.dtype.type(divisor)).view(wide)
            if place < 0:
                row = out[~place].astype(accumulate_dtype_of(out.dtype)) + row.astype(
                    accumulate_dtype_of(out.dtype)
                )
            total[~place if place < 0 else place] = row.astype(out.dtype)
    return total


def check(device, to, of, width, starts=(0, 0), into=MIXED, divisor=1):
    values = random_data((INDICES.size, width), of, seed=width)
    held = random_data((7, width), to, seed=width + 1)
    made, term = Operand(device, held.reshape(-1), starts[0]), Operand(
        device, values.reshape(-1), starts[1]
    )  # fmt: skip
    out, rows = made.buffer.view(0, held.shape), term.buffer.view(0, values.shape)
    segment_sum([out], [rows], [plan_segments(INDICES)], into=[into], divisor=divisor)
    assert same(made.array.reshape(held.shape), combined(held, values, into, divisor))
    assert made.contained()
    assert term.unchanged()


@pytest.mark.parametrize("template", SEGMENT_SUM.templates, ids=SEGMENT_SUM.expression)
def test_every_template(device, template):
    to, of = map(as_dtype, template)
    for width in WIDTHS:
        for starts in start_patterns(2):
            check(device, to, of, width, starts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    for width in (3, 16):
        check(geometric_device, dtype, dtype, width)


@pytest.mark.parametrize("into", [~np.arange(5), np.arange(5), np.array([~6, ~4, ~2, ~1, ~0])])
def test_all_or_none_of_the_rows(device, into):
    for dtype in ("float16", "float32", "int8", "complex64"):
        check(device, as_dtype(dtype), as_dtype(dtype), 5, into=into)


def test_the_quotient_is_added(device):
    """The existing value of the row is not divided."""
    for dtype in ("float16", "float32", "float64", "complex64"):
        check(device, as_dtype(dtype), as_dtype(dtype), 4, divisor=3)


def test_one_launch_for_sums_that_are_new_and_sums_that_are_there(device):
    plan = plan_segments(INDICES)
    values = [random_data((INDICES.size, 4), "float32", seed=k) for k in range(3)]
    outs = [Operand(device, random_data((28,), "float32", seed=9)) for _ in range(3)]
    into = [np.arange(5), ~np.arange(5), MIXED]
    rows = [Operand(device, each.reshape(-1)) for each in values]
    with recorded(device) as journal:
        segment_sum(
            [out.buffer.view(0, (7, 4)) for out in outs],
            [row.buffer.view(0, (INDICES.size, 4)) for row in rows],
            [plan] * 3,
            into=into,
        )
    assert (journal.launches, journal.uploads) == (1, 1)
    for out, value, places in zip(outs, values, into, strict=True):
        expected = combined(out.values.reshape(7, 4), value, places)
        assert same(out.array.reshape(7, 4), expected)


def test_a_prepared_sum_has_uploaded_and_not_launched(device):
    out, term = (Operand(device, random_data((size,), "float32")) for size in (28, 40))
    with recorded(device) as journal:
        launch = segment_sum_command(
            [out.buffer.view(0, (7, 4))], [term.buffer.view(0, (10, 4))],
            [plan_segments(INDICES)], into=[MIXED],
        )  # fmt: skip
        assert (journal.launches, journal.uploads) == (0, 1)
        assert out.unchanged()
        launch()
    assert (journal.launches, journal.uploads) == (1, 1)
    expected = combined(out.values.reshape(7, 4), term.values.reshape(10, 4), MIXED)
    assert same(out.array.reshape(7, 4), expected)
