"""take_rows in every implementation, against NumPy's own indexing, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.exact_data import DTYPES, random_data, same
from support.implementations import Operand, blank, recorded, start_patterns

from gradreduce.ops import take_rows_command

NUM_ROWS = 50
ROWS = np.random.default_rng(0).integers(0, NUM_ROWS, 83)  # some more than once
WIDTHS = [1, 3, 8, 16, 40]


def take_rows(outs, values, rows):
    take_rows_command(outs, values, rows)()


def taken(device, tensors, starts=(0, 0)):
    """(values, rows) of each tensor -> one call; looks at every byte around."""
    made = []
    for values, rows in tensors:
        source = Operand(device, values.reshape(-1), starts[1])
        out = blank(device, rows.size * values[0].size, values.dtype, starts[0])
        made.append((out, source, values.shape[1:], rows))
    take_rows(
        [out.buffer.view(0, (rows.size, *shape)) for out, _, shape, rows in made],
        [source.buffer.view(0, (NUM_ROWS, *shape)) for _, source, shape, _ in made],
        [rows for *_, rows in made],
    )
    for (values, rows), (out, source, _, _) in zip(tensors, made, strict=True):
        assert same(out.array, values[rows].reshape(-1))
        assert out.contained()
        assert source.unchanged()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_and_start(device, dtype):
    for width in WIDTHS:
        for starts in start_patterns(2):
            taken(device, [(random_data((NUM_ROWS, width), dtype), ROWS)], starts)


def test_any_geometry(geometric_device):
    for width in (*WIDTHS, 600):
        taken(geometric_device, [(random_data((NUM_ROWS, width), "float16"), ROWS)])


def test_many_tensors_are_one_launch_for_each_dtype_and_one_upload(device):
    tensors = [
        (random_data((NUM_ROWS, 2, width), dtype), rows)
        for dtype in ("float32", "bfloat16")
        for width in WIDTHS
        for rows in (ROWS, ROWS[:7], ROWS[:0])
    ]
    with recorded(device) as journal:
        taken(device, tensors)
    assert [(record.name, record.num_rows) for record in journal.records if record.num_rows] == [
        ("take_rows", 10)
    ] * 2, "four bytes and two"
    assert journal.uploads == 1


def test_nothing_for_nothing(device):
    with recorded(device) as journal:
        take_rows([], [], [])
        taken(device, [(random_data((NUM_ROWS, 3), "float32"), ROWS[:0])])
    assert journal.records == []


@pytest.mark.parametrize(
    ("out", "values", "rows", "match"),
    [
        ("float32 3 4", "float64 9 4", [0, 1, 2], "must have rows of one dtype"),
        ("float32 3 4", "float32 9 5", [0, 1, 2], "row sizes differ"),
        ("float32 3 4", "float32 9 4", [0, 1], "expected an int64"),
        ("float32 3 4", "float32 9 4", [0.0, 1.0, 2.0], "expected an int64"),
        ("float32 3 4", "float32 9 4", [0, 1, 9], "are out of range"),
        ("float32 3 4", "float32 9 4", [0, -1, 2], "are out of range"),
        ("float32", "float32 9", [0], "must have rows of one dtype"),
    ],
)
def test_what_does_not_fit_changes_nothing(device, out, values, rows, match):
    def made(text):
        dtype, *shape = text.split()
        size = int(np.prod([int(extent) for extent in shape], dtype=int))
        operand = Operand(device, random_data((size,), dtype))
        return operand, operand.buffer.view(0, tuple(map(int, shape)))

    (kept, into), (_, source) = made(out), made(values)
    good, fine = made("float32 2 4"), made("float32 9 4")
    with recorded(device) as journal, pytest.raises(ValueError, match=match):
        take_rows([good[1], into], [fine[1], source], [np.array([1, 2]), np.array(rows)])
    assert journal.records == []
    assert kept.unchanged()
    assert good[0].unchanged()


def test_an_out_in_its_values_or_read_only_is_refused(device):
    memory = Operand(device, random_data((40,), "float32"))
    values, out = memory.buffer.view(0, (9, 4)), memory.buffer.view(32, (2, 4))
    with pytest.raises(ValueError, match="overlaps"):
        take_rows([out], [values], [np.array([0, 1])])
    fixed = Operand(device, random_data((8,), "float32"), writable=False)
    with pytest.raises(ValueError, match="read-only"):
        take_rows([fixed.buffer.view(0, (2, 4))], [values], [np.array([0, 1])])
    assert memory.unchanged()
