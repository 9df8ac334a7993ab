"""clip in every implementation, against its formula, bit by bit."""

import numpy as np
import pytest
from support.exact_data import FLOATS, random_data, same
from support.implementations import Operand, accumulate_dtype_of, blank, recorded, start_patterns

from gradreduce.ops import clip

SIZES = [0, 1, 17, 1003, 16_385]


def clipped(given, norm, limit):
    wide = accumulate_dtype_of(given.dtype)
    with np.errstate(all="ignore"):
        norm, limit = np.float64(norm), np.float64(limit)
        factor = limit * min(1 / norm, 1 / limit) + (norm - norm)
        return (given.astype(wide) * wide.type(factor)).astype(given.dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.7, float("inf"), float("nan")])
def test_every_norm_and_start(device, dtype, norm):
    total = Operand(device, np.array([norm]))
    for limit in (1.0, 0.3):
        for starts in start_patterns(2):
            rows = [(blank(device, size, dtype, starts[0]),
                     Operand(device, random_data((size,), dtype, seed=size), starts[1],
                             writable=False))
                    for size in SIZES]  # fmt: skip
            outs, given = ([row[place].buffer for row in rows] for place in (0, 1))
            clip(outs, given, total.buffer, limit=limit)
            for out, term in rows:
                assert same(out.array, clipped(term.values, norm, limit))
                assert out.contained()
                assert term.unchanged()
    assert total.unchanged()


def test_any_geometry_and_in_place(geometric_device):
    total = Operand(geometric_device, np.array([3.0]))
    given = Operand(geometric_device, random_data((40_000,), "float32"))
    clip([given.buffer], [given.buffer], total.buffer, limit=1.5)
    assert same(given.array, clipped(given.values, 3.0, 1.5))


def test_one_launch_for_each_dtype(device):
    total = device.put(np.array([2.0]))
    given = [device.put(np.ones(3, dtype)) for dtype in ("float32", "float16")] * 100
    outs = [device.empty(each.shape, each.dtype) for each in given]
    with recorded(device) as journal:
        clip(outs, given, total, limit=1.0)
    assert [(each.name, each.num_rows) for each in journal.records] == [("clip", 100)] * 2
    assert all((out.numpy() == 0.5).all() for out in outs)
