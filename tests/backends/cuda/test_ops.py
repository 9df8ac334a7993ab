"""Every kernel on the CUDA backend gives the bits of its NumPy reference."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from support.exact_data import COMPLEX, DTYPES, FLOATS, INTEGERS, random_data, same
from support.implementations import accumulate_dtype_of
from support.update_formulas import FORMULAS
from support.update_operands import rule_of

from gradreduce import ops
from gradreduce.backends import open_mesh
from gradreduce.device import Buffer, Device, as_dtype, mean_dtype

pytestmark = pytest.mark.gpu

# One element; a vector and a tail; more than a chunk of a table.
SIZES = (1, 17, 1003, 16_387)
LARGE = (2_000_003, 3)  # more chunks than an H200 has blocks for
AROUND = 16  # elements on either side of an operand, which no launch may write


class Launch(NamedTuple):
    """The arguments of a launch.

    Attributes:
        call: with the columns of the table: ``columns[operand][tensor]``.
        num_operands: of one tensor; those that are written come first.
        dtypes: that it is tried with.
        out: the dtype of the first operand, made of that of all others.
        wide: operands that are of the type in which these dtypes are added.
    """

    call: Callable[[list[list[Buffer]]], None]
    num_operands: int
    dtypes: tuple[np.dtype, ...] = DTYPES
    out: Callable[[np.dtype], np.dtype] = as_dtype
    wide: tuple[int, ...] = ()


def rows(columns: list[list[Buffer]]) -> list[list[Buffer]]:
    return [list(row) for row in zip(*columns, strict=True)]


LAUNCHES = {
    "add_n of 1": Launch(lambda of: ops.add_n(of[0], rows(of[1:])), 2),
    "add_n of 3": Launch(lambda of: ops.add_n(of[0], rows(of[1:])), 4),
    "add_n of 11": Launch(lambda of: ops.add_n(of[0], rows(of[1:])), 12),
    "accumulate_n of 2": Launch(lambda of: ops.accumulate_n(of[0], rows(of[1:])), 3),
    "all_sum of 5 in halves": Launch(lambda of: ops.all_sum(rows(of[:2]), rows(of[2:]), 2), 7),
    "all_sum divided": Launch(
        lambda of: ops.all_sum(rows(of[:2]), rows(of[2:]), divisor=3), 5, FLOATS + COMPLEX
    ),
    "pack": Launch(lambda of: ops.pack(of[0], of[1]), 2),
    "pack divided": Launch(lambda of: ops.pack(of[0], of[1], divisor=10), 2, FLOATS + COMPLEX),
    "divide": Launch(lambda of: ops.divide(of[0], of[1], 3), 2, INTEGERS, mean_dtype),
}

LAUNCHES["distance_scale"] = Launch(
    lambda of: ops.distance_scale(*of, gamma=0.1), 4, FLOATS, accumulate_dtype_of, wide=(1,)
)
for _kernel in (each for each in ops.KERNELS if isinstance(each, ops.RuleKernel)):
    _, _slots, _scalars = FORMULAS[rule_of(_kernel)]
    _lead = {"plain": (), "local": (0,), "global": (3,)}[_kernel.variant]
    LAUNCHES[_kernel.name] = Launch(
        lambda of, kernel=_kernel, scalars=(*_lead, *_scalars): ops.update_rows(
            kernel, rows(of), scalars, of[0][0].device
        ),
        _kernel.num_plain,
        FLOATS,
        wide={"plain": (), "local": (1 + _slots,), "global": (2 + _slots,)}[_kernel.variant],
    )


@pytest.fixture(scope="module")
def reference() -> Iterator[Device]:
    with open_mesh(1, backend="sim", strict=True) as mesh:
        yield mesh.devices[0]


@pytest.fixture
def device(gpus) -> Iterator[Device]:
    gpus(5)
    with open_mesh([0, 0], backend="cuda") as mesh:
        yield mesh.devices[1]


def after(
    device: Device, launch: Launch, dtype: np.dtype, start: int, sizes=SIZES
) -> list[np.ndarray]:
    """The whole memory of all operands after one launch of tensors of these sizes.

    Args:
        device: that launches.
        launch: what is launched.
        dtype: of all operands, but for the first of those that are cast.
        start: elements by which operands miss a 16-byte boundary, each one more than the last.
        sizes: of the tensors.
    """
    memory, columns = [], []
    for operand in range(launch.num_operands):
        column, kind = [], dtype if operand else launch.out(dtype)
        kind = accumulate_dtype_of(dtype) if operand in launch.wide else kind
        for size in sizes:
            values = random_data((size + 2 * AROUND,), kind, seed=100 * operand + size)
            memory.append(device.upload(values))
            column.append(memory[-1].view((start * operand) % AROUND, (size,)))
        columns.append(column)
    launch.call(columns)
    return [buffer.numpy() for buffer in memory]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, launch in LAUNCHES.items() for dtype in launch.dtypes],
    ids=str,
)
def test_a_launch_is_that_of_the_reference(device, reference, name, dtype):
    for start in (0, 1):
        found = after(device, LAUNCHES[name], dtype, start)
        wanted = after(reference, LAUNCHES[name], dtype, start)
        for place, (array, expected) in enumerate(zip(found, wanted, strict=True)):
            assert same(array, expected), f"operand {place // len(SIZES)}, start {start}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["add_n of 3", "accumulate_n of 2", "all_sum of 5 in halves", "pack divided", "nesterov"],
)
def test_a_large_launch_is_that_of_the_reference(device, reference, name):
    dtype = as_dtype("float32")
    found = after(device, LAUNCHES[name], dtype, 1, LARGE)
    assert all(map(same, found, after(reference, LAUNCHES[name], dtype, 1, LARGE)))


@pytest.mark.parametrize(
    ("to", "of"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_a_pack_casts_as_the_reference_does(device, reference, to, of):
    def packed(place: Device) -> np.ndarray:
        term = place.upload(random_data((SIZES[-1],), of))
        out = place.zeros((SIZES[-1] + AROUND,), as_dtype(to))
        ops.pack([out], [term], divisor=2)
        return out.numpy()

    assert same(packed(device), packed(reference))
