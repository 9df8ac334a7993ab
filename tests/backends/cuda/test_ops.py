"""Every kernel on the CUDA backend gives the bits of its NumPy reference."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from kernels.ptx.launches import scalars_of, small_row
from support.exact_data import same
from support.exhaustive import covering

from gradreduce.backends import open_mesh
from gradreduce.device import Device, Kernel, Template
from gradreduce.ops import KERNELS

pytestmark = pytest.mark.gpu

# One element; a vector and a tail; more than a chunk of a table.
SIZES = (1, 17, 1003, 16_387)
LARGE = (2_000_003, 3)  # more chunks than an H200 has blocks for
AROUND = 16  # elements on either side of an operand, which no launch may write
CASES = {
    "-".join([kernel.name, *map(str, template)]): (kernel, template)
    for kernel in KERNELS
    for template in kernel.templates
}


def cases() -> Iterator[object]:
    """The names of the cases; a plain run has those in which every part of a template occurs."""
    for kernel in KERNELS:
        few = covering([tuple(enumerate(template)) for template in kernel.templates], 0)
        for number, template in enumerate(kernel.templates):
            marks = [pytest.mark.exhaustive] if number not in few else []
            yield pytest.param("-".join([kernel.name, *map(str, template)]), marks=marks)


@pytest.fixture(scope="module")
def reference() -> Iterator[Device]:
    with open_mesh(1, backend="sim", strict=True) as mesh:
        yield mesh.devices[0]


@pytest.fixture
def device(gpus) -> Iterator[Device]:
    gpus(5)
    with open_mesh([0, 0], backend="cuda") as mesh:
        yield mesh.devices[1]


def after(device: Device, kernel: Kernel, template: Template, scalars: Sequence[float],
          start: int, table: list[list[np.ndarray]]) -> list[np.ndarray]:  # fmt: skip
    """The whole memory of all operands after one launch of rows of these values.

    ``start``: elements by which operands miss a 16-byte boundary, each one more than the last.
    """
    memory, rows = [], []
    for arrays in table:
        rows.append([])
        for place, values in enumerate(arrays):
            before = start * place % AROUND
            around = (before, 2 * AROUND - before)
            memory.append(device.upload(np.pad(values, around, constant_values=7)))
            rows[-1].append(memory[-1].view(before, values.shape))
    device.launch(kernel, template, rows, scalars)
    return [buffer.numpy() for buffer in memory]


def check(device, reference, case, scalars, start, sizes=SIZES):
    kernel, template = CASES[case]
    table = [small_row(kernel, template, scalars, *each) for each in enumerate(sizes)]
    found, wanted = (
        after(each, kernel, template, scalars, start, table) for each in (device, reference)
    )
    with np.errstate(invalid="ignore"):  # NaNs of any payload
        for place, (array, expected) in enumerate(zip(found, wanted, strict=True)):
            assert same(array, expected), f"array {place}"


@pytest.mark.parametrize("case", [*cases()])
def test_a_launch_is_that_of_the_reference(device, reference, case):
    for start, scalars in enumerate(scalars_of(*CASES[case])[:2]):
        check(device, reference, case, scalars, start)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_n", "accumulate_n", "all_sum", "pack", "nesterov"])
def test_a_large_launch_is_that_of_the_reference(device, reference, name):
    case = f"{name}-float32-float32" + "-0" * (name in ("add_n", "all_sum"))
    check(device, reference, case, scalars_of(*CASES[case])[0], 1, LARGE)
