"""A device without a GPU: true values from NumPy or from the shipped ``.cu`` text on the CPU.

Never pretends: operands are checked, launches, copies and bytes are counted, memory comes from a
pool and is handed out dirty, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gradreduce.errors import CollectiveError, DeviceMismatchError

from .base import Collective, Device
from .compiled import host_kernel
from .dtypes import BFLOAT16, accumulate_dtype, as_dtype
from .fabric import Fabric
from .journal import Record
from .kernel import Kernel, Template
from .memory import Block, Buffer, Mark, Queue, Row
from .sim_pool import SimPool
from .table import INLINE_WORDS, pack_table, row_words

__all__ = ["FACES", "SimCollective", "SimDevice", "SimOptions", "Workers"]

# kernels= -> build of the .cu text (None: the NumPy twin)
FACES: dict[str, str | None] = {
    "numpy": None,
    "compiled": "fast",
    "exact": "exact",
    "sanitized": "sanitized",
}
# Elements of a twin's block: its scratch stays in the second-level cache. 8-term add of 8M float32
# on two cores, 2026-11: 2^14 25 ms, 2^16 18 ms, 2^19 24 ms.
BLOCK_SIZE = 1 << 16
# Handing work to another thread costs about 50 us: below this many elements one thread is faster.
SPREAD_SIZE = 1 << 18


class Workers:
    """The host threads that stand for the cores of all simulated devices of a mesh."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Runs all jobs, the last one in the calling thread; raises the first failure."""
        if len(jobs) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads - 1, "gradreduce-sim")
        futures = [self._pool.submit(job) for job in jobs[:-1]] if self._pool else []
        try:
            jobs[-1]()
        finally:
            for future in futures:
                future.result()

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


@dataclass(frozen=True)
class SimOptions:
    """How a simulated mesh behaves.

    Attributes:
        face: a key of ``FACES``: which face of a kernel a launch runs.
        strict: fill fresh memory with NaN (integers: 0xA5 bytes) instead of leaving it as it is.
        workers: the threads that run launches.
        geometry: blocks and threads of a launch in the exact and sanitized builds; any must give
            the same result, so this one is odd on purpose.
    """

    face: str
    strict: bool
    workers: Workers
    geometry: tuple[int, int] = (3, 37)


class SimDevice(Device):
    """A logical device in host memory. Work runs at once, in the calling thread."""

    def __init__(self, fabric: Fabric, index: int, physical: int, options: SimOptions) -> None:
        super().__init__(fabric, index, physical)
        self.options = options
        self._pool = SimPool()

    # -- memory ---------------------------------------------------------------------------------

    def adopt(self, array: Any, stream: int | None = None) -> Buffer:
        """See ``Device.adopt``; takes NumPy arrays."""
        if not isinstance(array, np.ndarray):
            raise DeviceMismatchError(f"{self.name} holds host arrays, not {type(array).__name__}")
        dtype = as_dtype(array.dtype)
        if not (array.flags.c_contiguous and array.flags.aligned):
            raise ValueError("an adopted array must be contiguous in C order and aligned")
        address = array.__array_interface__["data"][0]
        writable = bool(array.flags.writeable)
        block = Block(self, array, address, array.nbytes, owned=False, writable=writable)
        return Buffer(block, 0, array.shape, dtype, array)

    def release(self, buffer: Buffer, stream: int | None = None) -> np.ndarray:
        """See ``Device.release``; a NumPy array that keeps the memory alive."""
        return self.array(buffer)

    def put(self, array: Any) -> Buffer:
        """See ``Device.put``: a NumPy array is shared if contiguous and aligned, else copied."""
        array = np.asarray(array)
        as_dtype(array.dtype)
        if array.flags.c_contiguous and array.flags.aligned:
            return self.adopt(array)
        return self.upload(array)

    def array(self, buffer: Buffer) -> np.ndarray:
        """The NumPy array of ``buffer``'s memory; it keeps the block alive."""
        if buffer.array is None:
            block = buffer.block
            offset = buffer.address - block.address
            whole = np.asarray(block) if block.owned else block.raw.reshape(-1).view(np.uint8)
            part = whole[offset : offset + buffer.nbytes]
            buffer.array = part.view(buffer.dtype).reshape(buffer.shape)
        array: np.ndarray = buffer.array
        return array

    def _allocate(self, nbytes: int) -> Block:
        self.drain()
        return SimBlock(self, *self._pool.take(nbytes))

    def _recycle(self, raw: Any, nbytes: int, touched: set[tuple[Device, Queue]]) -> None:
        self._pool.give(raw, nbytes)

    def _trim(self) -> None:
        self._pool.clear()

    def _fill_fresh(self, buffer: Buffer) -> None:
        if not self.options.strict:
            return
        array = self.array(buffer)
        if buffer.dtype.kind in "fc" or buffer.dtype == BFLOAT16:
            array.fill(np.nan)
        else:
            array.reshape(-1).view(np.uint8).fill(0xA5)

    def _fill_zero(self, buffer: Buffer) -> None:
        self.array(buffer).fill(0)

    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        np.copyto(self.array(dst), array)

    def _download(self, buffer: Buffer) -> np.ndarray:
        return self.array(buffer).copy()

    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        np.copyto(self.array(dst).reshape(-1), self.array(src).reshape(-1))

    # -- work -----------------------------------------------------------------------------------

    def prepare(self, kernel: Kernel, template: Template) -> None:
        """See ``Device.prepare``."""
        build = FACES[self.options.face]
        if build is not None:
            host_kernel(kernel, build)

    def _launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> None:
        build = FACES[self.options.face]
        if build is None:
            self._launch_twin(kernel, rows, scalars)
        else:
            self._launch_compiled(kernel, template, rows, scalars, build)

    def _launch_twin(
        self, kernel: Kernel, rows: Sequence[Row], scalars: Sequence[int | float]
    ) -> None:
        num_written = kernel.num_written(scalars)
        blocks: list[list[np.ndarray]] = []
        for row in rows:
            arrays = [self.array(operand).reshape(-1) for operand in row]
            for position in range(num_written, len(arrays)):
                arrays[position] = read_only(arrays[position])
            for start in range(0, row[0].size, BLOCK_SIZE):
                blocks.append([array[start : start + BLOCK_SIZE] for array in arrays])

        def job(part: list[list[np.ndarray]]) -> Callable[[], None]:
            def run() -> None:
                with np.errstate(all="ignore"):  # a GPU raises no floating-point warnings
                    kernel.twin(part, *scalars)

            return run

        size = sum(row[0].size for row in rows)
        self.options.workers.run([job(part) for part in self._shares(blocks, size)])

    def _launch_compiled(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        build: str,
    ) -> None:
        words, num_chunks = row_words(rows)
        held = np.array(words, np.int64)
        address = 0 if len(words) <= INLINE_WORDS else held.__array_interface__["data"][0]
        entry = host_kernel(kernel, build)
        geometry = self.options.geometry

        def job(chunks: Sequence[int]) -> Callable[[], None]:
            table = pack_table(held, len(rows), num_chunks, address=address)
            table["first_chunk"], table["end_chunk"] = chunks[0], chunks[-1] + 1
            return lambda: entry.run(template, table, scalars, geometry)

        size = sum(row[0].size for row in rows)
        self.options.workers.run([job(part) for part in self._shares(range(num_chunks), size)])

    def _shares(self, blocks: Sequence[Any], size: int) -> list[Any]:
        """``blocks`` cut into one contiguous part for each thread, or left whole if small."""
        num_parts = min(self.options.workers.num_threads, len(blocks))
        if size < SPREAD_SIZE or num_parts == 1:
            return [blocks]
        cuts = [len(blocks) * part // num_parts for part in range(num_parts + 1)]
        return [blocks[start:end] for start, end in pairwise(cuts)]

    def _mark(self, queue: Queue) -> None:
        return None  # work runs at once: every place in a queue has passed

    def _wait(self, mark: Mark, queue: Queue) -> None:
        return None

    def _synchronize(self) -> None:
        return None


class SimBlock(Block):
    """Pool memory that a NumPy array can hold on to, so that it outlives its Buffers."""

    __slots__ = ()

    def __init__(self, device: Device, raw: np.ndarray, address: int, nbytes: int) -> None:
        super().__init__(device, raw, address, nbytes, owned=True, writable=True)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that refuses to be written: a twin that writes an input fails."""
    view = array[:]
    view.flags.writeable = False
    return view


class SimCollective(Collective):
    """Collectives over simulated devices: added in the accumulate type, in order, rounded once."""

    def all_reduce(self, buffers: Sequence[Buffer], op: str = "sum") -> None:
        """See ``Collective.all_reduce``."""
        if op != "sum":
            raise NotImplementedError(f"all_reduce with op={op!r}: only 'sum' so far")
        arrays = self._arrays("all_reduce", buffers)
        total = arrays[0].astype(accumulate_dtype(buffers[0].dtype))
        with np.errstate(all="ignore"):
            for array in arrays[1:]:
                total += array
            for array in arrays:
                array[...] = total

    def broadcast(self, buffers: Sequence[Buffer], root: int) -> None:
        """See ``Collective.broadcast``."""
        arrays = self._arrays("broadcast", buffers)
        for array in arrays:
            if array is not arrays[root]:
                array[...] = arrays[root]

    def all_gather(self, outputs: Sequence[Buffer], inputs: Sequence[Buffer]) -> None:
        """See ``Collective.all_gather``."""
        gathered = np.concatenate([part.reshape(-1) for part in self._arrays("all_gather", inputs)])
        for buffer in outputs:
            _sim(buffer).array(buffer).reshape(-1)[...] = gathered

    def _arrays(self, name: str, buffers: Sequence[Buffer]) -> list[np.ndarray]:
        """The arrays of a call whose buffers agree, one on each physical device."""
        first = buffers[0]
        if len({buffer.device.physical for buffer in buffers}) != len(buffers):
            raise CollectiveError(f"{name}: two buffers lie on one physical device: {buffers}")
        for position, buffer in enumerate(buffers):
            if (buffer.size, buffer.dtype) != (first.size, first.dtype):
                raise CollectiveError(f"{name}: buffer {position} is {buffer}, buffer 0 {first}")
            if not buffer.block.writable:
                raise CollectiveError(f"{name}: buffer {position} is read-only")
        recorder = first.device.fabric.recorder
        for buffer in buffers if recorder.recording else ():
            recorder.add(Record("collective", name, buffer.device.index, nbytes=buffer.nbytes))
        return [_sim(buffer).array(buffer) for buffer in buffers]


def _sim(buffer: Buffer) -> SimDevice:
    if not isinstance(buffer.device, SimDevice):
        raise DeviceMismatchError(f"{buffer} does not lie on a simulated device")
    return buffer.device
