"""Elements beyond 2**32 in every kernel, without the memory for them.

The operands are reserved addresses: the system gives a page when it is touched, and a launch here
does the last of its work only. 2**32, not 2**31, because an index cut to 32 bits, signed or not,
then falls on the first elements, where it shows, and not outside the operand.
"""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from kernels.test_traffic import MOVED
from support.exact_data import random_data, same
from support.implementations import ASKED, opened
from support.update_operands import rule_of

from gradreduce.device import Buffer, Device
from gradreduce.device.run.kernel import Kernel, Template
from gradreduce.ops import KERNELS, RuleKernel, plan_segments

BEHIND = 100  # elements after 2**32: vectors and a tail
SIZE = 2**32 + BEHIND
GAP = 37  # of pack
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python has it since 3.13
LAST = 3  # chunks that run: the small row, the end of the large one
TAKE_ROWS, SEGMENT_SUM = (
    next(kernel for kernel in KERNELS if kernel.name == name)
    for name in ("take_rows", "segment_sum")
)
# All updates use the same indices, so only the rule with the most operands is tested everywhere.
LARGE = [
    pytest.param(kernel, id=kernel.name, marks=() if is_first else pytest.mark.exhaustive)
    for kernel in KERNELS if kernel.items is None
    for is_first in [not isinstance(kernel, RuleKernel) or rule_of(kernel) == "adam"]
]  # fmt: skip


def reserved(size: int, dtype: str) -> np.ndarray:
    """Zeros that use no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, size * np.dtype(dtype).itemsize, flags=flags), dtype)


def launch(device: Device, kernel: Kernel, template: Template, rows, scalars) -> None:
    """Runs only the last pieces of a launch."""
    cut = []

    def last(blocks, size, costs=None):
        cut.append(len(blocks))
        return [blocks[-LAST:]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.options.workers, "shares", last)
        device.launch(kernel, template, rows, scalars)
    assert cut[0] > 1000  # nearly all of it was left out


def row_of(device: Device, kernel: Kernel, size: int) -> tuple[list[np.ndarray], list[Buffer]]:
    """Operands with data at their end and zeros before it; a flag has one element."""
    arrays = []
    for place, dtype in enumerate(MOVED[kernel.name][2]):
        if (kernel.name, dtype) == ("add_words", "int32"):
            arrays.append(np.zeros(1, dtype))
            continue
        short = GAP if kernel.name == "pack" and place else 0
        array = reserved(size - short, dtype)
        end = min(size, BEHIND) - short
        array[array.size - end :] = random_data((end,), dtype, seed=place)
        arrays.append(array)
    return arrays, [device.adopt(array) for array in arrays]


def ends(arrays: list[np.ndarray], size: int) -> list[np.ndarray]:
    return [array[max(0, size - BEHIND) :].copy() for array in arrays]


def right(device: Device, kernel: Kernel) -> bool:
    """Whether the ends of both rows equal the reference, and the rest is unchanged."""
    template, scalars, *_ = MOVED[kernel.name]
    sizes = (SIZE, BEHIND)
    rows = [row_of(device, kernel, size) for size in sizes]
    expected = [ends(arrays, size) for (arrays, _), size in zip(rows, sizes, strict=True)]
    with np.errstate(all="ignore"):
        kernel.reference(expected, *scalars)
    launch(device, kernel, template, [buffers for _, buffers in rows], scalars)
    found = [ends(arrays, size) for (arrays, _), size in zip(rows, sizes, strict=True)]
    large, small = (all(map(same, one, other)) for one, other in zip(found, expected, strict=True))
    return large and small and not any(array[:-BEHIND][:BEHIND].any() for array in rows[0][0])


@pytest.mark.parametrize("kernel", LARGE)
def test_the_end_of_a_large_row_and_the_row_behind_it(device, kernel):
    assert right(device, kernel)


@pytest.fixture(params=[ASKED] if ASKED else ["compiled", "exact"])
def host_device(request) -> Iterator[Device]:
    with opened(request.param) as made:
        yield made


# Of the shipped text only: a reference adds whole tensors.
@pytest.mark.host
def test_rows_of_more_columns(host_device):
    values, out = reserved(2 * SIZE, "uint8"), reserved(SIZE, "uint8")
    tail = random_data((2, BEHIND), "uint8")
    values.reshape(2, SIZE)[:, -BEHIND:] = tail
    plan = plan_segments(np.array([5, 5]))
    launch_row(host_device, SEGMENT_SUM, out, values, plan.order, plan.bounds)
    assert same(out[-BEHIND:], tail[0] + tail[1])
    assert not out[:BEHIND].any()


@pytest.mark.host
@pytest.mark.parametrize("kernel", [SEGMENT_SUM, TAKE_ROWS], ids=lambda kernel: kernel.name)
def test_more_rows(host_device, kernel):
    """Row k is segment k, or is taken as row k; the last ones are reversed."""
    values, out, rows = reserved(SIZE, "uint8"), reserved(SIZE, "uint8"), reserved(SIZE, "int64")
    values[-BEHIND:] = random_data((BEHIND,), "uint8")
    rows[-BEHIND:] = np.arange(SIZE - 1, SIZE - 1 - BEHIND, -1)
    bounds, near = reserved(SIZE + 1, "int64"), 2**20  # far more than the pieces that are run
    bounds[-near:] = np.arange(SIZE + 1 - near, SIZE + 1)
    launch_row(host_device, kernel, out, values, rows, *[bounds] * (kernel is SEGMENT_SUM))
    assert same(out[-BEHIND:], values[-BEHIND:][::-1].copy())
    assert not out[:BEHIND].any()


def launch_row(device: Device, kernel: Kernel, *row: np.ndarray) -> None:
    is_sum = kernel is SEGMENT_SUM
    template, scalars = ("uint8",) * (1 + is_sum), (0, 0, 1.0) if is_sum else ()
    launch(device, kernel, template, [[device.adopt(array) for array in row]], scalars)
