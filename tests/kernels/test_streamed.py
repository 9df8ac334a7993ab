"""Launches large enough for the fast build to store past the cache have the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.implementations import Operand, blank, opened

from gradreduce.device import Device
from gradreduce.ops import add_n, all_sum, pack

pytestmark = pytest.mark.host

LARGE = 2**22 + 21  # STREAM_ITEMS of common.cuh, and a tail
GAP = 21_000  # of pack: a whole chunk, and one in which the input ends


@pytest.fixture(scope="module")
def compiled() -> Iterator[Device]:
    with opened("compiled") as device:
        yield device


def terms(count: int, size: int = LARGE) -> list[np.ndarray]:
    return [np.resize(random_data((9973,), "float32", seed=seed), size) for seed in range(count)]


@pytest.mark.parametrize(("start", "in_place"), [(0, False), (0, True), (1, False)])
def test_large_sums_have_the_bits_of_numpy(compiled, start, in_place):
    values = terms(2)
    inputs = [Operand(compiled, value, start) for value in values]
    outs = inputs if in_place else [blank(compiled, LARGE, "float32", start) for _ in values]
    all_sum([[out.buffer for out in outs]], [[each.buffer for each in inputs]], divisor=2.0)
    with np.errstate(all="ignore"):
        expected = (values[0] + values[1]) / np.float32(2)
    assert all(same(out.array, expected) for out in outs)
    add_n([outs[0].buffer], [[outs[0].buffer, outs[1].buffer]])
    with np.errstate(all="ignore"):
        assert same(outs[0].array, expected + expected)
    assert all(each.contained() for each in (*inputs, *outs))


def test_large_packs_have_the_bits_of_numpy(compiled):
    """With a small row, and zeros after the inputs."""
    values = [*terms(1, LARGE - GAP), *terms(1, 100)]
    outs = [blank(compiled, size, "float32") for size in (LARGE, 128)]
    pack([out.buffer for out in outs], [Operand(compiled, value).buffer for value in values])
    for out, value in zip(outs, values, strict=True):
        assert same(out.array, np.append(value, np.zeros(out.array.size - value.size, "float32")))
        assert out.contained()
