"""The simulated device: runs kernels with NumPy, or with ``.cu`` files built for the CPU.

It computes true values. As on a GPU, operands are checked, operations are logged, and memory comes
from a pool with the values of its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradreduce.device import (
    BFLOAT16,
    CHUNK_SIZE,
    QUEUES,
    Block,
    Buffer,
    Command,
    Device,
    HostCopy,
    HostMove,
    Kernel,
    Mark,
    MeshState,
    Parcel,
    Queue,
    Record,
    Row,
    Tables,
    Template,
    WaitPolicy,
    Work,
    as_dtype,
    bytes_of,
)
from gradreduce.errors import DeviceMismatchError

from .fp_warnings import without_warnings
from .host_compile import host_kernel
from .pool import SimPool
from .scheduler import Scheduler, SimEvent
from .workers import BLOCK_SIZE, Workers

# The overhead of NumPy's calls for a block, as the number of elements added in that time.
CALL_COST = 1 << 11


@dataclass(frozen=True)
class SimOptions:
    """The options of a simulated mesh.

    Attributes:
        build: the build of the ``.cu`` text that runs kernels; None: the NumPy references.
        strict: fill fresh memory with NaN (integers: 0xA5 bytes).
        workers: the threads that run launches.
        scheduler: runs the queues of all devices of the mesh.
        geometry: the blocks and threads of a launch in the exact and sanitized builds. The result
            must not depend on them, so the default values are unusual.
    """

    build: str | None
    strict: bool
    workers: Workers
    scheduler: Scheduler
    geometry: tuple[int, int] = (3, 37)


class SimDevice(Device):
    """A logical device in host memory; its scheduler decides when work runs."""

    def __init__(
        self, mesh_state: MeshState, index: int, physical: int, options: SimOptions
    ) -> None:
        super().__init__(mesh_state, index, physical)
        self.options = options
        self.scheduler = options.scheduler
        self.defers = mesh_state.order.is_needed = options.scheduler.defers
        self.compiles = options.build is not None
        self._pool = SimPool()
        self._tables = Tables(lambda words: (words.__array_interface__["data"][0], words))

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        """See ``Device.allocate``; with ``strict`` fills the memory with NaN."""
        buffer = super().allocate(shape, dtype)
        memory = memory_of(buffer)  # made now, so that parts of the buffer are slices of it
        if self.options.strict:
            kind = "f" if buffer.dtype == BFLOAT16 else buffer.dtype.kind
            value: complex = {"f": np.nan, "c": complex(np.nan, np.nan)}.get(kind, 0xA5)
            memory = memory if kind in "fc" else memory.view(np.uint8)
            self.submit("compute", partial(memory.fill, value))
        if self.defers:  # this, or the end of the last owner, was submitted
            self.mesh_state.order.add_work(self.compute)
        return buffer

    def _adopt(self, array: Any, writable: bool) -> Buffer:
        if not isinstance(array, np.ndarray):
            raise DeviceMismatchError(f"{self.name} holds host arrays, not {type(array).__name__}")
        array = np.asarray(array)  # removes subclasses: np.matrix has no flat view
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            raise ValueError(
                "an adopted array must be contiguous in C order and aligned: pass a copy"
            )
        return self._share(array, address_of(array), writable and flags.writeable)

    def _share(self, array: np.ndarray, address: int, writable: bool) -> Buffer:
        dtype = as_dtype(array.dtype)
        if self.external_buffers.is_used and writable:
            block = self.external_buffers.find(address, array.nbytes)
            if block is not None and block.device is self:
                return Buffer(block, address - block.address, array.shape, dtype)
        block = Block(self, array, address, array.nbytes, False, writable)
        if self.defers:
            self._deferred_free.track(block)
        return Buffer(block, 0, array.shape, dtype, array)

    def put_all(
        self, arrays: Sequence[Any], addresses: Sequence[int] | None = None
    ) -> list[Buffer]:
        """See ``Backend.put_all``: NumPy arrays are shared if contiguous and aligned, else copied.

        If work is deferred all are copied: their owner may change them after the call returns.
        """
        self.mesh_state.check_usable(self)
        buffers = []
        for index, array in enumerate(map(np.asarray, arrays)):
            flags = array.flags
            if flags.c_contiguous and flags.aligned and not self.defers:
                address = address_of(array) if addresses is None else addresses[index]
                buffers.append(self._share(array, address, flags.writeable))
            else:
                as_dtype(array.dtype)
                buffers.append(self.upload(array))
        return buffers

    def _array_of(self, buffer: Buffer) -> np.ndarray:
        if buffer.array is None:
            raw, block = buffer.block.raw, buffer.block
            whole = raw.export(block) if block.owned else raw.reshape(-1).view(np.uint8)
            start = buffer.address - block.address
            buffer.array = np.ndarray(buffer.shape, buffer.dtype, whole, start)
        array: np.ndarray = buffer.array
        return array

    def _allocate(self, nbytes: int) -> Block:
        self.drain()
        memory = self._pool.allocate(nbytes)
        block = Block(self, memory, memory.address, nbytes, owned=True, writable=True)
        return self._deferred_free.track(block)

    def _recycle(self, raw: Any, nbytes: int) -> None:
        if self.defers:  # work that still uses it reads NaN
            self.submit("compute", partial(raw.bytes.fill, 0xFF))
        self._pool.release(raw)

    def _trim(self) -> None:
        self._pool.clear()

    def _fill_zero(self, buffer: Buffer) -> None:
        self.submit("compute", partial(memory_of(buffer).fill, 0))

    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        source = array.copy() if self.defers else array
        into = memory_of(dst).reshape(dst.shape)
        command = partial(self.submit, queue, partial(np.copyto, into, source))
        self._order(command, Work(self.queues[queue], [(dst,)], 1))

    def _download(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        if not self.scheduler.finish((self.physical, "compute"), wait_policy):
            return None
        return self._array_of(buffer).copy()

    def _make_download(self, buffer: Buffer) -> tuple[Command, HostCopy]:
        memory, copies = memory_of(buffer), list[np.ndarray]()

        def work() -> None:
            copies.append(memory.copy())

        return partial(self.submit, "compute", work), lambda: copies[0] if copies else None

    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        self.submit(queue, partial(np.copyto, memory_of(dst), memory_of(src)))

    # -- work -----------------------------------------------------------------------------------

    def _exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: HostMove
    ) -> None:
        outgoing = [(rank, bytes_of(memory_of(buffer))) for rank, buffer in sends if buffer.size]
        incoming = [(rank, bytes_of(memory_of(buffer))) for rank, buffer in receives if buffer.size]
        command = partial(self.submit, queue, partial(move, outgoing, incoming))
        self._order(command, self._parcels(sends, receives, queue))
        if self.defers:  # else two processes may wait for each other
            self.scheduler.finish((self.physical, queue))

    def _compile_kernel(self, kernel: Kernel, template: Template) -> None:
        build = self.options.build
        if build is not None:
            host_kernel(kernel, build)

    def _make_launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> tuple[Command, None]:
        build = self.options.build
        if build is None:
            work = self._reference_work(kernel, rows, scalars)
        else:
            work = self._compiled_work(kernel, template, rows, scalars, build)
        return partial(self.submit, queue, work), None

    def submit(self, queue: Queue, work: Callable[[], None]) -> None:
        """Submits work to a queue."""
        self.scheduler.submit((self.physical, queue), work)

    def _reference_work(
        self, kernel: Kernel, rows: Sequence[Row], scalars: Sequence[int | float]
    ) -> Callable[[], None]:
        strict, whole = self.options.strict, kernel.items is not None
        items = kernel.num_items(rows)
        if not strict and not whole and sum(items) <= BLOCK_SIZE:
            small = [
                [memory_of(operand) if operand.flat is None else operand.flat for operand in row]
                for row in rows
            ]
            # One block: nothing to share among threads.
            return partial(without_warnings, kernel.reference, small, *scalars)
        num_written = kernel.num_written(scalars)
        workers = self.options.workers
        blocks: list[list[np.ndarray]] = []
        costs: list[int] = []
        for row, size in zip(rows, items, strict=True):
            arrays = [memory_of(operand) for operand in row]
            if strict:
                arrays[num_written:] = map(read_only, arrays[num_written:])
            if whole or size <= BLOCK_SIZE:
                blocks.append(arrays)
                costs.append(CALL_COST + size)
                continue
            length = workers.block_size(size, streams=kernel.streams_row(row))
            for start in range(0, size, length):
                blocks.append(
                    [
                        array if array.size == 1 else array[start : start + length]
                        for array in arrays
                    ]
                )
            costs += [CALL_COST + length] * -(-size // length)
        jobs = [
            partial(without_warnings, kernel.reference, part, *scalars)
            for part in workers.shares(blocks, sum(items), costs)
        ]
        return partial(workers.run, jobs)

    def _compiled_work(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        build: str,
    ) -> Callable[[], None]:
        items = kernel.num_items(rows)
        table = self._tables.find(rows, items, CHUNK_SIZE)
        entry = host_kernel(kernel, build)[template]
        # The memory must stay allocated until the work is done; the block need not.
        memory = [operand.block.raw for row in rows for operand in row]

        def job(chunks: range, _memory: object) -> None:
            entry(table.argument, chunks.start, chunks.stop, *self.options.geometry, *scalars)

        workers = self.options.workers
        shares = workers.shares(range(table.num_chunks), sum(items))
        jobs = [partial(job, chunks, memory) for chunks in shares]
        return jobs[0] if len(jobs) == 1 else partial(workers.run, jobs)

    def run_on_host(
        self, kernel: Kernel, row: Sequence[np.ndarray], scalars: Sequence[int | float]
    ) -> bool:
        """See ``Backend.run_on_host``; runs the NumPy reference."""
        if self.defers or self.options.strict or self.options.build:
            return False
        self.mesh_state.check_usable(self)
        work = partial(without_warnings, kernel.reference, [row], *scalars)
        command = partial(self.submit, "compute", work)
        record = Record("launch", kernel.name, self.index, num_rows=1)
        self._submit(command, record, Work(self.compute, (), 0))
        return True

    def _mark(self, queue: Queue) -> SimEvent:
        return self.scheduler.record((self.physical, queue))

    def _wait(self, mark: Mark, queue: Queue) -> None:
        self.scheduler.wait((self.physical, queue), mark.event)

    def _synchronize(self, wait_policy: WaitPolicy, queues: Sequence[Queue] = QUEUES) -> bool:
        return all(self.scheduler.finish((self.physical, queue), wait_policy) for queue in queues)

    def _progress(self) -> None:
        self.scheduler.progress()

    def _is_waiting(self, queue: Queue) -> bool:
        return self.scheduler.is_waiting((self.physical, queue))

    def _abandon(self, seconds: float) -> bool:
        self.scheduler.drop()
        return True


def memory_of(buffer: Buffer) -> np.ndarray:
    """Returns the flat array that queued work uses; it does *not* keep the block alive.

    As on a GPU, memory that is freed too early may have another owner when the work runs.
    """
    flat: np.ndarray | None = buffer.flat
    if flat is not None:
        return flat
    block = buffer.block
    if block.owned:
        start = buffer.offset // buffer.dtype.itemsize  # slicing is faster than making an array
        made: np.ndarray = block.raw.as_dtype(buffer.dtype)[start : start + buffer.size]
        buffer.flat = made
        return made
    whole: np.ndarray = block.raw.reshape(-1)
    if buffer.array is block.raw:
        buffer.flat = whole  # the buffer keeps the memory alive by its array
        return whole
    part = whole.view(np.uint8)[buffer.offset : buffer.offset + buffer.nbytes]
    return part.view(buffer.dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    """Returns a read-only view, so that a reference that writes an input fails."""
    view = array[:]
    view.flags.writeable = False
    return view


def address_of(array: np.ndarray) -> int:
    """Returns the address of an array's memory, five times as fast as NumPy."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, or bfloat16
        return array.ctypes.data
