"""segment_sum in every implementation, against a loop over the rows; and its plan."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import COMPLEX, DTYPES, FLOATS, random_data, same
from support.exhaustive import examples
from support.implementations import (
    INLINE_ROWS,
    NUM_THREADS,
    SPLIT_SIZE,
    Operand,
    accumulate_dtype_of,
    blank,
    counted_threads,
    recorded,
    segment_sum,
    start_patterns,
)

from gradreduce.device import as_dtype
from gradreduce.ops import concatenate_indices, plan_segments, segment_sum_command
from gradreduce.ops.segment_sum import LEVELS, PART_SIZE, SEGMENT_SUM

# Widths near vectors of 1 to 16 elements: odd ones, and whole vectors of some dtypes.
WIDTHS = (0, 1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 255)
INDICES = np.array([3, 9, 3, 0, 3, 9, 5, 2**40, 0, 3])
# Rows of the out that are added to (~) or overwritten, in no order; rows 4 and 6 are not used.
MIXED = np.array([~5, 2, ~0, 1, ~3])


def sums(values, indices, divisors=1):
    """Adds row by row in a plain loop, in the accumulate type; in the order of the indices."""
    wide, found = accumulate_dtype_of(values.dtype), {}
    with np.errstate(all="ignore"):
        for index, row in zip(indices.tolist(), values.astype(wide), strict=True):
            found[index] = found[index] + row if index in found else row
        rows = np.array([found[index] for index in sorted(found)], wide)
        rows = rows.reshape(len(found), *values.shape[1:])
        if np.any(np.not_equal(divisors, 1)):
            parts = rows.view(rows.real.dtype)  # divides real and imaginary parts separately
            by = np.broadcast_to(np.asarray(divisors, "float64"), (len(found),))
            rows = (parts / by.astype(parts.dtype)[:, None]).view(wide)
        return rows


class Rows:
    """The operands of one tensor: its rows, and an out for their sums or for the whole array.

    ``into`` has the row of the out for each sum, or its complement if the sum is added to the row.
    """

    def __init__(self, device, values, indices, starts=(0, 0), num_rows=None, out=None, into=None):
        self.plan, self.indices, self.values = plan_segments(indices), indices, values
        dtype = as_dtype(out or values.dtype)
        self.term = Operand(device, values.reshape(-1), starts[1], writable=False)
        self.into = self.plan.indices if num_rows and into is None else into
        rows = self.plan.num_segments if num_rows is None else num_rows
        width = math.prod(values.shape[1:])
        self.made = blank(device, rows * width, dtype, starts[0])
        if into is not None:
            self.made = Operand(device, random_data((rows * width,), dtype, seed=1), starts[0])
        self.out = self.made.buffer.view(0, (rows, width))
        self.buffer = self.term.buffer.view(0, values.shape)

    def right(self, divisors=1):
        """Whether the out equals that of the loop, and other memory is unchanged."""
        expected = self.made.values.reshape(self.out.shape).copy()
        made = sums(self.values, self.indices, divisors)
        made = made.reshape(len(made), expected.shape[1])
        wide = accumulate_dtype_of(expected.dtype)
        with np.errstate(all="ignore"):
            for place, row in zip(range(len(made)) if self.into is None else self.into, made,
                                  strict=True):  # fmt: skip
                held = expected[~place].astype(wide) if place < 0 else None
                total = row if held is None else held + row.astype(wide)
                expected[max(place, ~place)] = total.astype(expected.dtype)
        found = self.made.array.reshape(self.out.shape)
        return same(found, expected) and self.made.contained() and self.term.unchanged()


def check(device, *tensors, divisor=1):
    """Adds all tensors in one call."""
    into = [tensor.into for tensor in tensors]
    segment_sum(
        [tensor.out for tensor in tensors],
        [tensor.buffer for tensor in tensors],
        [tensor.plan for tensor in tensors],
        into=into,
        divisor=divisor,
    )
    each = divisor if isinstance(divisor, list) else [divisor] * len(tensors)
    for tensor, by in zip(tensors, each, strict=True):
        assert tensor.right(by), (tensor.out, tensor.buffer, tensor.indices, by)


def indices_of(lengths, seed=0):
    """Segments of these lengths, their rows in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(lengths)) * 3, lengths))


# -- the plan -------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0, 1, 2, 3, 7, 2**40, 2**62]), max_size=60))
def test_a_plan_is_a_stable_sort(indices):
    halves = indices[: len(indices) // 2], indices[len(indices) // 2 :]
    plan = plan_segments(concatenate_indices([np.array(half, np.int64) for half in halves]))
    assert plan.indices.tolist() == sorted(set(indices))
    wanted = sorted(range(len(indices)), key=lambda row: indices[row])
    assert plan.order.tolist() == wanted
    assert (plan.num_rows, plan.num_segments) == (len(indices), len(set(indices)))
    starts = plan.bounds.tolist()
    assert (starts[0], starts[-1], len(starts)) == (0, len(indices), len(set(indices)) + 1)
    for index, start, end in zip(plan.indices, starts, starts[1:], strict=False):
        assert start < end
        assert {indices[row] for row in plan.order[start:end]} == {index}
    assert {part.dtype for part in (plan.indices, plan.order, plan.bounds)} == {np.dtype("int64")}


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_and_start(device, dtype):
    values = [random_data((INDICES.size, width), dtype, seed=width) for width in WIDTHS]
    for starts in start_patterns(2):
        check(device, *[Rows(device, each, INDICES, starts) for each in values])
        check(device, *[Rows(device, each, INDICES % 11, starts, num_rows=11) for each in values])


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 3), (6, 2, 0, 3), (6, 1, 1, 4)], ids=str)
def test_a_row_has_all_dimensions_after_the_first(device, shape):
    values = random_data(shape, "float32")
    check(device, Rows(device, values, INDICES[:6]))
    check(device, Rows(device, values, INDICES[:6], num_rows=10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 4, 5])
def test_segments_of_every_length(device, dtype, width):
    lengths = [1, 2, 3, 8, LEVELS - 1, LEVELS, LEVELS + 1, 3 * LEVELS + 5]
    indices = indices_of(lengths)
    check(device, Rows(device, random_data((indices.size, width), dtype), indices))


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
def test_segments_longer_than_the_reference_takes_at_a_time(device, dtype):
    size = PART_SIZE + LEVELS + 3
    check(device, Rows(device, random_data((size, 1), dtype), np.full(size, 7)))
    check(device, Rows(device, random_data((9, PART_SIZE + 1), dtype), np.full(9, 7)))


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7.3, -1, 0, 1e-320, float("inf"), float("nan")])
def test_the_sum_is_divided_before_it_is_rounded(device, dtype, divisor):
    """By one number, or by one for each segment."""
    each = np.array([1, 3, 7.3, -1, 2**24 + 1.0]) * divisor
    for width in (3, 16):
        values = random_data((INDICES.size, width), dtype, seed=width)
        check(device, Rows(device, values, INDICES), divisor=divisor)
        check(device, Rows(device, values, INDICES), divisor=[each])
        check(device, Rows(device, values, INDICES % 11, num_rows=11), divisor=[each])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    by = 1 if dtype.kind in "iu" else 3
    for width in (1, 3, 16, 17):
        indices = indices_of([1 + k % 5 for k in range(1100)])
        values = random_data((indices.size, width), dtype)
        for starts in start_patterns(2)[:2]:
            tensor = Rows(geometric_device, values, indices, starts, num_rows=3300)
            check(geometric_device, tensor, divisor=by)
        few = Rows(geometric_device, values[: INDICES.size], INDICES, num_rows=7, into=MIXED)
        check(geometric_device, few)


@pytest.mark.parametrize("template", SEGMENT_SUM.templates, ids=SEGMENT_SUM.expression)
def test_every_template_and_its_cast(device, template):
    to, of = map(as_dtype, template)
    values = [random_data((INDICES.size, width), of, seed=width) for width in (1, 3, 8, 16, 17, 64)]
    for starts in start_patterns(2):
        check(device, *[Rows(device, each, INDICES, starts, out=to) for each in values])
        check(device, *[Rows(device, each, INDICES, starts, 7, to, MIXED) for each in values])
    wide = Rows(device, random_data((INDICES.size, 5), "complex64"), INDICES, out="complex128")
    check(device, wide, divisor=3)


# -- sums added to what rows hold -----------------------------------------------------------------


def test_all_or_none_of_the_rows_are_added_to_and_the_quotient_is_added(device):
    """The existing value of the row is not divided. All are one launch."""
    for dtype in ("float16", "float32", "complex64", "int8"):
        values = random_data((INDICES.size, 4), dtype)
        places = [~np.arange(5), np.arange(5), np.array([~6, ~4, ~2, ~1, ~0]), MIXED]
        with recorded(device) as journal:
            rows = [Rows(device, values, INDICES, (0, 0), 7, None, into) for into in places]
            check(device, *rows, divisor=1 if dtype == "int8" else 3)
        assert (journal.launches, journal.uploads) == (1, 1)


def test_a_prepared_sum_has_uploaded_and_not_launched(device):
    tensor = Rows(device, random_data((10, 4), "float32"), INDICES, (0, 0), 7, None, MIXED)
    with recorded(device) as journal:
        launch = segment_sum_command(
            [tensor.out], [tensor.buffer], [tensor.plan], into=[tensor.into]
        )
        assert (journal.launches, journal.uploads) == (0, 1)
        assert tensor.made.unchanged()
        launch()
    assert (journal.launches, journal.uploads) == (1, 1)
    assert tensor.right()


# -- the order is fixed ---------------------------------------------------------------------------


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    width=st.integers(0, 20),
    indices=st.lists(st.integers(0, 6), max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows(device, dtype, width, indices, seed):
    values = random_data((len(indices), width), dtype, seed=seed)
    check(device, Rows(device, values, np.array(indices, np.int64)))


# -- launches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_and_one_upload_for_tensors_of_all_sizes(device, dtype):
    sizes = [1, 700, 0, 3, 40, *range(1, 1 + INLINE_ROWS // 2), 7]
    for num_tensors in (5, len(sizes)):  # a table inline, and a larger one
        tensors = [
            Rows(
                device,
                random_data((size, width % 20), dtype, seed=size),
                indices_of([1 + k % 4 for k in range(size)])[:size],
                starts=(width % 3, width % 2),
            )
            for width, size in enumerate(sizes[:num_tensors], 1)
        ]
        with recorded(device) as journal:
            check(device, *tensors)
        assert (journal.launches, journal.uploads) == (1, 1)
        launched = sum(tensor.values.size > 0 for tensor in tensors)
        assert [each.num_rows for each in journal.records if each.kind == "launch"] == [launched]


def test_what_cannot_be_one_launch_is_still_one_upload(device):
    """Other dtypes and divisors, divisors per row, and rows of a whole array."""
    by = np.array([1.0, 2, 3, 4, 5])
    kinds = [("float32", 1, 0), ("float16", 1, 0), ("float32", 2, 0), ("float32", by, 0),
             ("float32", 1, 11), ("float32", by, 11)]  # fmt: skip
    tensors, divisors = [], []
    for dtype, divisor, num_rows in kinds * 2:
        values = random_data((INDICES.size, 3), dtype, seed=len(tensors))
        tensors.append(Rows(device, values, INDICES % 11, num_rows=num_rows or None))
        divisors.append(divisor)
    with recorded(device) as journal:
        check(device, *tensors, divisor=divisors)
    assert (journal.launches, journal.uploads) == (len(kinds), 1)


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        segment_sum([], [], [])
        empty = np.zeros(0, np.int64)
        check(device, Rows(device, random_data((0, 3), "float32"), empty))
        check(device, Rows(device, random_data((0, 3), "float32"), empty, num_rows=5))
        check(device, Rows(device, random_data((3, 0), "float32"), INDICES[:3]))
    assert (journal.launches, journal.uploads) == (0, 0)


@pytest.mark.parametrize("dtype", ["float16", "complex64", "uint8"])
def test_tensors_are_spread_over_threads(device, dtype):
    """Compiled kernels are split at any item; NumPy references get whole tensors."""
    width = 720
    size = 2 * (SPLIT_SIZE // 680)
    indices = np.arange(size) // 2 * 2
    values = np.resize(random_data(40_003, dtype), (size, width))
    tensors = [Rows(device, values, indices) for _ in range(3)]
    with counted_threads(device) as num_jobs:
        check(device, *tensors)
        check(device, tensors[0])
    whole = device.options.build is None
    assert num_jobs == [NUM_THREADS, 1 if whole else NUM_THREADS]
