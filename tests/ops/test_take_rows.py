"""take_rows in every implementation, against NumPy's own indexing, bit by bit."""

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
    """Takes rows of all tensors in one call, and checks every byte around the results."""
    made = []
    for values, rows in tensors:
        source = Operand(device, values.reshape(-1), starts[1], writable=False)
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
