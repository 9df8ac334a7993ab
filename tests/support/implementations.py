"""The implementations of a kernel under test, and operands that detect stray accesses."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import DTypeLike
from support.exact_data import random_data

from gradreduce.backends import open_mesh
from gradreduce.device import Buffer, Device, Journal, as_dtype
from gradreduce.device.memory.dtypes import BFLOAT16
from gradreduce.device.run.table import INLINE_WORDS, ROW_HEADER
from gradreduce.ops import segment_sum_command

# "sanitized" runs the tests of kernels/ and ops/ under AddressSanitizer and UBSan, which must be
# preloaded, and with that implementation only.
ASKED = os.environ.get("GRADREDUCE_TEST_KERNELS", "")
if ASKED not in ("", "sanitized"):
    raise pytest.UsageError(f"GRADREDUCE_TEST_KERNELS={ASKED!r} is neither '' nor 'sanitized'")
# The implementation that can run with a GPU's geometry.
EXACT = ASKED or "exact"
IMPLEMENTATIONS = [
    implementation
    if implementation == "numpy"
    else pytest.param(implementation, marks=pytest.mark.host)
    for implementation in ([ASKED] if ASKED else ["numpy", "compiled", "exact"])
]
GEOMETRIES = [
    pytest.param(shape, marks=pytest.mark.host, id=f"{shape[0]}x{shape[1]}")
    for shape in ((1, 1), (1, 32), (3, 37), (64, 256))
]
NUM_THREADS = 3  # the same on every machine; SPLIT_SIZE is cut into unequal parts

# Sizes near those of vectors (1 to 16 elements) and near the chunk of a table.
SIZES = (0, 1, 3, 7, 8, 15, 16, 17, 255, 16_383, 16_384, 16_385)
SPLIT_SIZE = 2**18 + 13  # enough for several threads
INLINE_ROWS = INLINE_WORDS // (ROW_HEADER + 2)  # of two operands; more do not fit inline
# Bytes. As a float of any size: positive and at least 200; negative and tiny.
AROUND, BLANK = 0x5A, 0xA5


def segment_sum(*operands, **options) -> None:
    """Plans a sum of segments, and launches it."""
    segment_sum_command(*operands, **options)()


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def device(implementation) -> Iterator[Device]:
    """A strict simulated device that runs that implementation."""
    with opened(implementation) as made:
        yield made


@pytest.fixture(scope="module", params=GEOMETRIES)
def geometric_device(request) -> Iterator[Device]:
    """A device that runs the compiled kernels with the blocks and threads of a GPU."""
    with opened(EXACT) as made:
        made.options = replace(made.options, geometry=request.param)
        yield made


@contextmanager
def opened(implementation: str) -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADREDUCE_SIM_THREADS", str(NUM_THREADS))
        mesh = open_mesh(1, backend="sim", kernels=implementation, strict=True)
    with mesh:
        yield mesh.devices[0]


def recorded(device: Device) -> AbstractContextManager[Journal]:
    return device.mesh_state.log.journal()


@contextmanager
def counted_threads(device: Device) -> Iterator[list[int]]:
    """The number of threads that can run the jobs of each launch of the device."""
    workers, num_jobs = device.options.workers, []
    run = workers.run

    def counted(jobs) -> None:
        num_jobs.append(min(len(jobs), NUM_THREADS))
        run(jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run", counted)
        yield num_jobs


def accumulate_dtype_of(dtype: np.dtype) -> np.dtype:
    """The accumulate type of ``dtype``, defined independently of the source."""
    halves = (np.dtype("float16"), BFLOAT16)
    return np.dtype("float32") if dtype in halves else dtype


def start_patterns(num_operands: int) -> list[list[int]]:
    """Offsets of operands from a vector boundary: none, all equal, the last only, all different."""
    last = [0] * (num_operands - 1) + [1]
    return [[0] * num_operands, [1] * num_operands, last, list(range(num_operands))]


def random_terms(num_terms: int, size: int, dtype: DTypeLike, seed: int = 0) -> list[np.ndarray]:
    return list(random_data((num_terms, size), dtype, seed=seed))


class Operand:
    """A Buffer with guard bytes around it.

    Its memory starts ``start`` elements after a 16-byte boundary. The guard bytes hold a large
    number: reading it changes a result, and writing it is detected. (NaN is not used, because a
    write may leave it a NaN.) With the sanitizers there are no guard bytes after the operand.

    Attributes:
        buffer: the operand as an adopted Buffer.
        array: the memory of the operand; tests read results here.
        values: the initial values.
    """

    def __init__(
        self,
        device: Device,
        values: np.ndarray,
        start: int = 0,
        *,
        writable: bool = True,
        around: int = AROUND,
    ) -> None:
        behind = 0 if device.options.build == "sanitized" else 16
        size, itemsize = start + values.size + behind, values.itemsize
        self._whole = np.full(size * itemsize, around, np.uint8).view(values.dtype)
        assert self._whole.ctypes.data % 16 == 0
        self._inside = slice(start, start + values.size)
        self.array = self._whole[self._inside]
        self.array[...] = values
        self.values = values.copy()
        self._guards = self._guard_bytes()
        self._whole.flags.writeable = writable
        self.buffer: Buffer = device.adopt(self._whole).view(start, values.shape)

    def unchanged(self) -> bool:
        """Whether neither the operand nor a guard byte has changed."""
        return self.contained() and self.array.tobytes() == self.values.tobytes()

    def contained(self) -> bool:
        """Whether no guard byte has changed."""
        return self._guard_bytes() == self._guards

    def _guard_bytes(self) -> tuple[bytes, bytes]:
        before, behind = self._inside.start, self._inside.stop
        return self._whole[:before].tobytes(), self._whole[behind:].tobytes()


def blank(device: Device, size: int, dtype: DTypeLike, start: int = 0) -> Operand:
    """An operand to be written; it and its guard bytes hold a value that no result has."""
    return Operand(device, blank_values(size, dtype), start, around=BLANK)


def blank_values(size: int, dtype: DTypeLike) -> np.ndarray:
    dtype = as_dtype(dtype)
    return np.full(size * dtype.itemsize, BLANK, np.uint8).view(dtype)


def operands(
    device: Device, values: Sequence[np.ndarray], starts: Sequence[int] | None = None
) -> list[Operand]:
    return [
        Operand(device, part, start)
        for part, start in zip(values, starts or [0] * len(values), strict=True)
    ]


def buffers(row: Sequence[Operand]) -> list[Buffer]:
    return [operand.buffer for operand in row]
