"""Launches large enough for the fast build to store past the cache have the same bits."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.exact_data import random_data, same
from support.implementations import Operand, blank, buffers, opened

from gradreduce.device import Device
from gradreduce.ops import add_n, all_sum, pack

pytestmark = pytest.mark.host

NUM_ROWS, SIZE = 16, 2**18 + 21  # together STREAM_ITEMS of common.cuh or more; rows with a tail
GAP = 21_000  # of pack: a whole chunk, and one in which the input ends


@pytest.fixture(scope="module")
def compiled() -> Iterator[Device]:
    with opened("compiled") as device:
        yield device


def terms(num_terms: int, size: int = SIZE) -> list[np.ndarray]:
    data = [random_data((9973,), "float32", seed=seed) for seed in range(num_terms)]
    return [np.resize(term, size) for term in data]


@pytest.mark.parametrize(("start", "in_place"), [(0, False), (0, True), (1, False)])
def test_large_sums_have_the_bits_of_numpy(compiled, start, in_place):
    """Sums out of place read the same inputs for every row, which takes less memory."""
    values = terms(2)
    num_inputs = NUM_ROWS if in_place else 1
    inputs = [[Operand(compiled, value, start) for value in values] for _ in range(num_inputs)]
    outs = inputs
    if not in_place:
        outs = [[blank(compiled, SIZE, "float32", start) for _ in values] for _ in range(NUM_ROWS)]
    read = [buffers(row) for row in inputs] * (NUM_ROWS // num_inputs)
    all_sum([buffers(row) for row in outs], read, divisor=2.0)
    with np.errstate(all="ignore"):
        expected = (values[0] + values[1]) / np.float32(2)
    assert all(same(out.array, expected) for row in outs for out in row)
    add_n([row[0].buffer for row in outs], [buffers(row) for row in outs])
    with np.errstate(all="ignore"):
        expected = expected + expected
    assert all(same(row[0].array, expected) for row in outs)
    assert all(operand.contained() for row in (*inputs, *outs) for operand in row)


def test_large_packs_have_the_bits_of_numpy(compiled):
    """With a small row, and zeros after the inputs."""
    values = [*terms(1, SIZE - GAP), *terms(1, 100)]
    large, small = [Operand(compiled, value).buffer for value in values]
    outs = [*(blank(compiled, SIZE, "float32") for _ in range(NUM_ROWS)),
            blank(compiled, 128, "float32")]  # fmt: skip
    pack(buffers(outs), [large] * NUM_ROWS + [small])
    for out, value in zip(outs, [values[0]] * NUM_ROWS + values[1:], strict=True):
        assert same(out.array, np.append(value, np.zeros(out.array.size - value.size, "float32")))
        assert out.contained()
