"""all_sum in every implementation, against a plain reference, bit by bit."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import COMPLEX, DTYPES, FLOATS, same
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
from support.meshes import MeshCase

from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError
from gradreduce.ops import all_sum
from gradreduce.ops.all_sum import ALL_SUM


def left_to_right(terms, wide):
    total = terms[0].astype(wide)
    for term in terms[1:]:
        total = total + term.astype(wide)
    return total


def reference(terms, split=0, divisor=1, out=None):
    wide = accumulate_dtype_of(terms[0].dtype)
    with np.errstate(all="ignore"):
        if split:
            total = left_to_right(terms[:split], wide) + left_to_right(terms[split:], wide)
        else:
            total = left_to_right(terms, wide)
        if divisor != 1:
            parts = total.view(total.real.dtype)  # divides real and imaginary parts separately
            total = (parts / parts.dtype.type(divisor)).view(wide)
        return total.astype(out or terms[0].dtype)


def check(device, rows, num_outs=1, split=0, divisor=1, starts=None):
    """Sums every row in one call, and checks every byte."""
    outs, inputs = [], []
    for terms, row in zip(rows, starts or [None] * len(rows), strict=True):
        row = row or [0] * (num_outs + len(terms))
        blanks = [blank(device, terms[0].size, terms[0].dtype, start) for start in row[:num_outs]]
        outs.append(blanks)
        inputs.append(operands(device, terms, row[num_outs:]))
    all_sum(list(map(buffers, outs)), list(map(buffers, inputs)), split, divisor=divisor)
    for made, row, terms in zip(outs, inputs, rows, strict=True):
        expected = reference(terms, split, divisor)
        for out in made:
            assert same(out.array, expected), (out.buffer, split, divisor, starts)
            assert out.contained()
        assert all(operand.unchanged() for operand in row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_and_start(device, dtype):
    for num_outs, num_inputs, split in ((1, 2, 0), (2, 4, 2)):
        terms = random_terms(num_inputs, max(SIZES), dtype)
        for size in SIZES:
            for starts in start_patterns(num_outs + num_inputs):
                row = [term[:size] for term in terms]
                check(device, [row], num_outs, split, starts=[starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_inputs_and_split(device, dtype):
    for num_inputs in range(1, 10):
        terms = random_terms(num_inputs, 203, dtype, seed=num_inputs)
        for split in range(num_inputs):
            check(device, [terms], 1 + split % 3, split)


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7.3, -1, 0, 1e-320, float("inf"), float("nan")])
def test_the_sum_is_divided_before_it_is_rounded(device, dtype, divisor):
    for split in (0, 2):
        check(device, [random_terms(5, 1003, dtype, seed=split)], 2, split, divisor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_geometry(geometric_device, dtype):
    divisor = 1 if dtype.kind in "iu" else 3
    for size in (1, 17, 255, 16_385, 40_000):
        for starts in start_patterns(5)[:2]:
            check(geometric_device, [random_terms(3, size, dtype)], 2, 1, divisor, [starts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(device, dtype):
    """Every out is an input of the same or of another row."""
    for num_inputs in (1, 2, 3, 8):
        terms = random_terms(num_inputs, 20_003, dtype)
        expected = reference(terms, num_inputs // 2)
        for turn in range(num_inputs):
            inputs = operands(device, terms)
            row = buffers(inputs)
            outs = [out.view(0, out.shape) for out in row[turn:] + row[:turn]]
            all_sum([outs], [row], num_inputs // 2)
            for operand in inputs:
                assert same(operand.array, expected)
                assert operand.contained()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_out_is_one_input(device, dtype):
    terms = random_terms(3, 20_003, dtype)
    for place in range(3):
        inputs, other = operands(device, terms), blank(device, 20_003, dtype)
        all_sum([[other.buffer, inputs[place].buffer]], [buffers(inputs)], 1)
        assert same(inputs[place].array, reference(terms, 1))
        assert same(other.array, reference(terms, 1))
        assert all(inputs[k].unchanged() for k in range(3) if k != place)


@contextmanager
def replicas(implementation, peer_access):
    """Four replicas, two of them on one physical device: Buffers and their arrays."""
    terms = random_terms(4, 1003, "bfloat16")
    with MeshCase((0, 0, 1, 2), peer_access, implementation).open() as mesh:
        yield mesh, terms, [device.upload(one) for device, one in zip(mesh, terms, strict=True)]


@pytest.mark.parametrize("split", range(4))
def test_replicas_beside_and_on_peers_in_one_launch(implementation, split):
    """Each out is on another device than its input, or is the input."""
    with replicas(implementation, True) as (mesh, terms, inputs):
        outs = [device.empty((1003,), "bfloat16") for device in mesh.devices[::-1]]
        for made in (outs, inputs):
            for device in mesh:
                mesh.devices[1].queue_wait(device.queue_mark())
            with mesh.journal() as journal:
                all_sum([made], [inputs], split, device=mesh.devices[1])
            assert [(record.name, record.device) for record in journal.records] == [("all_sum", 1)]
            assert all(same(out.numpy(), reference(terms, split)) for out in made)


def test_replicas_out_of_reach_are_refused_and_unchanged(implementation):
    with replicas(implementation, False) as (mesh, terms, inputs):
        for outs, read in ((inputs[:1], inputs), (inputs, inputs[:2])):
            with mesh.journal() as journal, pytest.raises(DeviceMismatchError, match="peer access"):
                all_sum([outs], [read], 1)
            assert journal.records == []
        assert all(same(one.numpy(), term) for one, term in zip(inputs, terms, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_for_rows_of_all_sizes(device, dtype):
    sizes = [1, 60_001, 0, 3, 16_384, 7, *range(40, 40 + INLINE_ROWS), 16_385, 0, 2]
    for num_rows in (6, len(sizes)):  # a table inline, and a larger one
        rows = [random_terms(3, size, dtype, seed=size) for size in sizes[:num_rows]]
        starts = [[row % 3, row % 2, 0, 0, 0] for row in range(num_rows)]
        with recorded(device) as journal:
            check(device, rows, 2, 1, starts=starts)
        assert journal.launches == 1
        assert journal.records[0].num_rows == sum(size > 0 for size in sizes[:num_rows])


def test_a_thousand_tiny_rows_are_one_launch(device):
    rows = [random_terms(2, 1 + row % 5, "float32", seed=row) for row in range(1000)]
    with recorded(device) as journal:
        check(device, rows, 2, 1, 2)
    assert [(record.name, record.num_rows) for record in journal.records] == [("all_sum", 1000)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "uint8"])
def test_large_rows_are_spread_over_threads(device, dtype):
    with counted_threads(device) as num_jobs:
        for starts in ([0] * 5, [0, 1, 2, 3, 4]):
            check(device, [random_terms(3, SPLIT_SIZE, dtype)], 2, 2, starts=[starts])
        check(
            device,
            [random_terms(2, size, dtype) for size in (SPLIT_SIZE // 2, 5, SPLIT_SIZE)],
        )
    assert num_jobs == [NUM_THREADS] * 3


@pytest.mark.parametrize("template", ALL_SUM.templates, ids=ALL_SUM.expression)
def test_every_template_and_its_cast(device, template):
    to, of = map(as_dtype, template[:2])
    num_inputs = template[2] or 3
    for divisor in (1,) if of.kind == "u" else (1, 3):
        for starts in start_patterns(2 + num_inputs):
            terms = random_terms(num_inputs, 1003, of)
            outs = [blank(device, 1003, to, start) for start in starts[:2]]
            inputs = operands(device, terms, starts[2:])
            all_sum([buffers(outs)], [buffers(inputs)], num_inputs // 2, divisor=divisor)
            for out in outs:
                assert same(out.array, reference(terms, num_inputs // 2, divisor, to))
                assert out.contained()
            assert all(operand.unchanged() for operand in inputs)


def test_each_dtype_and_number_of_operands_is_a_launch_of_its_own(device):
    outs, inputs = [], []
    for _ in range(3):
        for dtype, num_outs, num_inputs in (
            ("float32", 1, 2),
            ("float32", 2, 2),
            ("float32", 1, 3),
            ("float16", 1, 2),
            ("int32", 1, 2),
        ):
            outs.append([blank(device, 100, dtype) for _ in range(num_outs)])
            inputs.append(operands(device, random_terms(num_inputs, 100, dtype)))
    with recorded(device) as journal:
        all_sum(list(map(buffers, outs)), list(map(buffers, inputs)))
    assert journal.launches == 5
    for made, row in zip(outs, inputs, strict=True):
        expected = reference([operand.values for operand in row])
        assert all(same(out.array, expected) for out in made)


def test_nothing_is_launched_for_nothing(device):
    with recorded(device) as journal:
        all_sum([], [])
        check(device, [random_terms(2, 0, "float32")] * 3, 2)
    assert journal.launches == 0


def test_lists_of_different_lengths_change_nothing(device):
    row = operands(device, random_terms(2, 16, "float32"))
    with pytest.raises(ValueError, match="zip"):
        all_sum([buffers(row[:1])], [buffers(row), buffers(row)])
    assert all(operand.unchanged() for operand in row)


def test_inputs_may_be_read_only(device):
    terms = random_terms(3, 1003, "float32")
    out = blank(device, 1003, "float32")
    all_sum([[out.buffer]], [[Operand(device, term, writable=False).buffer for term in terms]], 1)
    assert same(out.array, reference(terms, 1))


@settings(max_examples=examples(30), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_outs=st.integers(1, 3),
    num_inputs=st.integers(1, 6),
    data=st.data(),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 5), min_size=9, max_size=9),
)
def test_many_rows_are_as_one_launch_each(device, dtype, num_outs, num_inputs, data, sizes, starts):
    split = data.draw(st.integers(0, num_inputs - 1), "split")
    rows = [random_terms(num_inputs, size, dtype, seed=size) for size in sizes]
    inputs = [buffers(operands(device, terms, starts[num_outs:][:num_inputs])) for terms in rows]
    together, alone = (
        [[blank(device, size, dtype, start) for start in starts[:num_outs]] for size in sizes]
        for _ in range(2)
    )
    all_sum(list(map(buffers, together)), inputs, split)
    for outs, row in zip(alone, inputs, strict=True):
        all_sum([buffers(outs)], [row], split)
    for outs, others in zip(together, alone, strict=True):
        assert all(same(outs[0].array, out.array) for out in (*outs, *others))
        assert all(out.contained() for out in outs)
