"""Devices: check arguments, queue waits, record operations, and call the ``Backend``.

``README.md`` beside this file lists what every backend promises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from gradreduce.errors import (
    BackendUnavailableError,
    CaptureError,
    DeviceMismatchError,
    NotCopied,
)

from .failure.pending_calls import WaitPolicy, as_deadline
from .failure.waiting import call_under_lock
from .log.op_log import QUEUES, Record
from .memory.buffer import Buffer, Mark, Queue, Row, Stream, handle_of
from .memory.dtypes import as_dtype
from .memory.freed import DeferredFree
from .memory.peers import check_accessible, check_all_accessible, check_writable
from .mesh_state import MeshState
from .order.order import LOOK_SECONDS, Work
from .processes import Parcel
from .run.backend import Backend
from .run.commands import Command
from .run.kernel import Kernel, Template

if TYPE_CHECKING:
    from .mesh import Mesh

# Freed blocks that a device may keep for the next allocation. Each wait for a caller looks at them.
MANY_FREED = 16


class Device(NotCopied, Backend):
    """One logical device: memory, and the two queues of its physical device.

    Several logical devices may share a physical one, and then share its queues ``compute`` and
    ``transfer``. Most users pass devices on and do not call their methods. A backend implements
    the methods of ``Backend``; checks, waits between queues and records are code of this class. The
    host waits only where a method says so.

    Attributes:
        mesh_state: the state that the devices of a mesh share.
        index: the logical number: the position in the whole mesh.
        physical: the number of the physical device (the GPU ordinal).
        queues: the queues of the physical device, by name.
        compute: its compute queue.
        mesh: the whole mesh that the device was opened with.
        freed: memory of freed blocks, until ``drain`` takes it back.
        external_buffers: the external buffers of the mesh.
        defers: whether a call may return before the work that it has submitted is done.
        compiles: whether a first launch compiles its kernel.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> mesh[1]
        <device sim:1 on physical 1>
        >>> buffer = mesh[1].upload(np.arange(3.0))
        >>> mesh[1].download(buffer)
        array([0., 1., 2.])
    """

    _copy_hint = "open a mesh by gr.open_mesh where it is needed"

    mesh: Mesh
    defers: bool = False
    compiles: bool = True

    def __init__(self, mesh_state: MeshState, index: int, physical: int) -> None:
        self.mesh_state = mesh_state
        self.index = index
        self.physical = physical
        self._endless = WaitPolicy(self)
        self.queues = {queue: mesh_state.order.queue(self, queue) for queue in QUEUES}
        self.compute = self.queues["compute"]
        mesh_state.log.physical[index] = physical
        self._deferred_free = DeferredFree()
        self.freed = self._deferred_free.freed
        self.external_buffers = mesh_state.external_buffers

    @property
    def name(self) -> str:
        """``"sim:3"``: backend and logical index."""
        return f"{self.mesh_state.backend}:{self.index}"

    def __repr__(self) -> str:
        return f"<device {self.name} on physical {self.physical}>"

    # -- memory ---------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | str) -> Buffer:
        """Allocates a Buffer from this device's pool; its content is undefined.

        Args:
            shape: a tuple or list of integers; ``()`` for a single number.
            dtype: a dtype that can be added, or its name.

        Raises:
            MemoryError: there is not enough memory, even after trimming the pools of the whole
                mesh.
            ValueError: an integer of ``shape`` is negative.
            TypeError: ``dtype`` is not a dtype that can be added, or ``shape`` has another type.
        """
        if min(shape, default=0) < 0:
            raise ValueError(f"shape={shape} has a negative extent")
        return self.allocate(tuple(shape), as_dtype(dtype))

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        """Like ``empty``, for a shape and dtype that are checked already."""
        self.mesh_state.check_usable(self)
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            return Buffer(self._allocate(nbytes), 0, shape, dtype)
        except MemoryError:  # pools of other devices may hold memory of the same GPU or host
            pass
        for device in self.mesh.devices:
            device.drop_free_memory()
        return Buffer(self._allocate(nbytes), 0, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | str) -> Buffer:
        """Allocates a Buffer of zeros; the fill is queued on the compute queue.

        Arguments and errors are those of ``empty``.
        """
        buffer = self.empty(shape, dtype)
        self.fill_zero(buffer)
        return buffer

    def fill_zero(self, buffer: Buffer) -> None:
        """Fills a Buffer of this device with zeros, in the order of the compute queue.

        Raises:
            ValueError: the Buffer is read-only.
        """
        self.mesh_state.check_usable(self)
        if not buffer.size:
            return
        check_writable(buffer)
        record = Record("fill", "", self.index, -1, buffer.nbytes)
        work = Work(self.compute, [(buffer,)], 1)
        self._submit(partial(self._fill_zero, buffer), record, work)

    def adopt(self, array: Any, stream: Stream | None = None, *, writable: bool = True) -> Buffer:
        """Wraps the caller's memory in a Buffer; the compute queue waits for ``stream``.

        If the array is part of a flat buffer of this device, the result is a view of that flat
        buffer.

        Args:
            array: a CuPy array on this GPU, or a NumPy array for a simulated device; contiguous in
                C order, of a dtype that can be added. The Buffer keeps it alive.
            stream: the stream that filled it, or its raw handle; None if it is filled already, as a
                host array is.
            writable: False if the array's library promises that it never changes. A read-only NumPy
                array is never writable.

        Raises:
            CaptureError: ``stream`` is capturing a CUDA graph.
            DeviceMismatchError: the array is not on this device, or is of another library.
            ValueError: the array is not contiguous.
            TypeError: its dtype cannot be added.
        """
        self.mesh_state.check_usable(self)
        buffer = self._adopt(array, writable)
        if stream is not None:
            self.wait_for_stream(stream)
        return buffer

    def release(self, buffer: Buffer, stream: Stream | None = None) -> Any:
        """Returns the backend's array of ``buffer``'s memory; see ``release_all``."""
        return self.release_all([buffer], stream)[0]

    def release_all(
        self, buffers: Sequence[Buffer], stream: Stream | None = None, *, waited: bool = False
    ) -> list[Any]:
        """Returns the backend's arrays of the Buffers' memory, without a copy.

        ``stream`` (None: the host) waits for our compute queue. If it is a stream object, not a raw
        handle, the arrays may be dropped while the stream still uses them.

        Args:
            buffers: Buffers of this device.
            stream: the caller's stream, or its raw handle.
            waited: whether ``stream`` already waits for all work queued for the Buffers.

        Raises:
            CaptureError: ``stream`` is capturing a CUDA graph.
            DeviceMismatchError: a Buffer is on another device.
        """
        self.mesh_state.check_usable(self)
        # The caller may write the arrays, so our queue waits for other uses below.
        used = [each.block for each in buffers if each.block.uses is not self.compute]
        waits = not waited or bool(used)
        if stream is not None and waits:
            self.check_stream(stream)
        for buffer in buffers:
            if buffer.device is not self:
                raise DeviceMismatchError(
                    f"{self.name}.release: {buffer} is on another device: call release there"
                )
            buffer.block.shared = True
        if used:
            self.mesh_state.order.wait_for_uses(used)
        if waits and (stream is not None or self.defers):
            self.block_stream(stream)
        if stream is not None and not isinstance(stream, int):  # a handle may be stale
            for buffer in buffers:
                buffer.block.record_stream(stream)
        return [self._array_of(buffer) for buffer in buffers]

    def check_stream(self, stream: Stream) -> None:
        """Raises ``CaptureError`` for a caller's stream that is capturing a CUDA graph.

        Call this before the first wait between a queue and the stream. If the queue waited for the
        stream, the queue would become part of the capture; if the stream waited for the queue, the
        capture would become invalid. Simulated devices have no streams and raise
        ``DeviceMismatchError``.
        """
        if self._is_capturing(stream):
            raise CaptureError(
                f"the caller's stream {handle_of(stream):#x} is capturing a CUDA graph, or is a "
                f"default stream that waits for one; work of {self.name} cannot be part of it. "
                "Make this call before the capture begins or after it has ended. For a reduction "
                "as a CUDA graph, make a step with AllReduceCrossDeviceOps.capture and call it "
                "outside other captures"
            )

    def wait_for_stream(self, stream: Stream, *, checked: bool = False) -> None:
        """Makes the compute queue wait for a caller's stream.

        The devices of a GPU share one compute stream, so one of them is enough.

        Args:
            stream: the caller's stream.
            checked: whether ``check_stream`` was called already.

        Raises:
            CaptureError: ``stream`` is capturing a CUDA graph.
            DeviceMismatchError: the device is simulated; it has no streams.
        """
        self.mesh_state.check_usable(self)
        if not checked:
            self.check_stream(stream)
        freed = [
            (device, device._deferred_free.find_used_by(stream))
            for device in self.mesh.devices
            if device.freed and device.physical == self.physical
        ]
        self._wait(Mark(self, stream, self._mark(stream)), "compute")
        self.mesh_state.order.note_wait_for_caller(self.compute)
        for each, users in freed:
            each._deferred_free.remove_users(users)
            if len(each.freed) > MANY_FREED:  # otherwise each step would look at all of them again
                each.drain()

    def block_stream(self, stream: Stream | None) -> None:
        """Makes a caller's stream wait for the compute queue; for None the host waits.

        The compute queue first waits for what other queues do with callers' memory.

        Call ``check_stream`` before submitting the work that the stream waits for.
        """
        order = self.mesh_state.order
        self.mesh_state.check_usable(self)
        order.wait_for_shared_uses(self.compute)
        if stream is not None:
            self._wait(order.mark(self.compute), stream)
        elif self.defers and not self._synchronize(self._endless, ("compute",)):
            raise self.mesh_state.abort_wait("a host wait for queued work", self, self._endless)

    def upload(
        self, array: np.ndarray, *, out: Buffer | None = None, queue: Queue = "compute"
    ) -> Buffer:
        """Copies a host array to a Buffer; does not wait for the copy.

        Args:
            array: any host array, contiguous or not; it may be changed as soon as this returns.
            out: the Buffer to write, on this device, of the array's shape and dtype. Default: a new
                one.
            queue: the queue that copies.

        Raises:
            DeviceMismatchError: ``out`` is on another device.
            ValueError: ``out`` has another shape or dtype, or is read-only.
            TypeError: the dtype of ``array`` cannot be added.
            MemoryError: see ``empty``.
        """
        self.mesh_state.check_usable(self)
        buffer = self.empty(array.shape, array.dtype) if out is None else out
        if buffer.device is not self:
            raise DeviceMismatchError(
                f"{self.name}.upload: out={buffer} is on another device: pass one on {self.name}"
            )
        if (buffer.shape, buffer.dtype) != (array.shape, as_dtype(array.dtype)):
            raise ValueError(
                f"upload: out={buffer} must have the shape {array.shape} and dtype {array.dtype} "
                "of the array"
            )
        check_writable(buffer)
        record = Record("upload", "", self.index, -1, buffer.nbytes, queue)
        command = partial(self._upload, buffer, array, queue)
        work = Work(self.queues[queue], [(buffer,)], 1)
        self._submit(command, record, work, is_ordered=True, is_repeated=False)
        return buffer

    def download(self, buffer: Buffer, *, deadline: float | None = None) -> np.ndarray:
        """Returns a host copy of ``buffer``; the host waits for it.

        Args:
            buffer: a Buffer of this device, or of another one that this device can access.
            deadline: seconds from now; if they pass first, the mesh fails.

        Raises:
            DeviceMismatchError: this device cannot access the Buffer.
            ValueError: ``deadline`` is not a number above 0.
        """
        wait_policy = self._wait_policy(deadline)
        self.mesh_state.check_usable(self)
        check_accessible(self, buffer)
        log, generation = self.mesh_state.log, self.mesh_state.generation
        ordered = partial(self._order, lambda: None, Work(self.compute, [(buffer,)], 0))
        look = partial(call_under_lock, self.mesh_state.order.lock, LOOK_SECONDS, ordered)
        if not wait_policy.polls:
            ordered()
        elif not wait_policy.until(look):
            raise self.mesh_state.abort_wait(f"a download of {buffer}", self, wait_policy)
        number = log.append(Record("download", "", self.index, -1, buffer.nbytes))
        host = self._download(buffer, wait_policy)
        self.mesh_state.order.add_work(self.compute)
        # An aborted collective lets its queue continue: results of later work are wrong.
        if host is None or self.mesh_state.has_failed(generation):
            raise self.mesh_state.abort_wait(f"a download of {buffer}", self, wait_policy)
        log.mark_finished(number, self, "compute")
        return host

    def _queue_exchange(
        self, command: Command, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue
    ) -> None:
        """Queues an exchange with other processes.

        Args:
            command: orders its parts itself, because the lock of the order must not be held while
                the host waits for other processes.
            sends: the buffers to send.
            receives: the buffers to receive into.
            queue: the queue that runs it.
        """
        nbytes = sum([buffer.nbytes for _, buffer in sends])
        record = Record("exchange", "", self.index, -1, nbytes, queue)
        work = self._parcels(sends, receives, queue)
        self._order(lambda: None, work)  # a list that records it needs the waits of all parts
        self._submit(command, record, work, is_ordered=True)

    def _parcels(self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue) -> Work:
        """Returns the operands of an exchange."""
        written, read = [buffer for _, buffer in receives], [buffer for _, buffer in sends]
        return Work(self.queues[queue], [(*written, *read)], len(written))

    def mark_failed(self, reason: str) -> None:
        """Marks the device as failed: later uses raise ``BackendUnavailableError``.

        All logical devices of the same physical device fail together.
        """
        self.mesh_state.check_process()
        self.mesh_state.mark_failed(self.physical, reason)

    # -- work -----------------------------------------------------------------------------------

    def copy(self, dst: Buffer, src: Buffer, *, queue: Queue = "compute") -> None:
        """Copies ``src`` to ``dst`` (same size and dtype) on a queue of this device.

        Raises:
            ValueError: sizes or dtypes differ, or ``dst`` is read-only.
            DeviceMismatchError: neither ``dst`` nor ``src`` is on this device, or one is of another
                mesh.
        """
        self.mesh_state.check_usable(self)
        if dst.dtype != src.dtype or dst.size != src.size:
            raise ValueError(f"copy to {dst} from {src}: sizes and dtypes must be equal")
        if (
            self not in (dst.device, src.device)
            or dst.device.mesh_state is not src.device.mesh_state
        ):
            raise DeviceMismatchError(
                f"{self.name}.copy: {dst} and {src} must belong to the mesh of {self.name}, and at "
                f"least one of them to {self.name}"
            )
        if dst.size == 0:
            return
        for end in (src, dst) if self.mesh_state.failed else ():
            self.mesh_state.check_usable(end.device)
        check_writable(dst)
        record = Record("copy", "", self.index, src.device.index, dst.nbytes, queue)
        work = Work(self.queues[queue], [(dst, src)], 1)
        self._submit(partial(self._copy, dst, src, queue), record, work)

    def launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float] = (),
        *,
        queue: Queue = "compute",
    ) -> None:
        """Launches ``kernel`` once over the rows of a table; does not wait for the device.

        Operands may be on any logical device of this physical device, or on a peer if their memory
        is mapped for peers. Rows without work (usually of size 0) are left out; if no row remains,
        nothing is launched.

        Raises:
            DeviceMismatchError: the device cannot access an operand.
            ValueError: an operand that the kernel writes is read-only.
        """
        self.mesh_state.check_usable(self)
        rows = list(compress(rows, kernel.num_items(rows)))
        if not rows:
            return
        blocks = {operand.block for row in rows for operand in row}
        crossing = check_all_accessible(self, blocks, rows)
        num_written = kernel.num_written(scalars)
        if [1 for block in blocks if not block.writable]:
            for operand in [operand for row in rows for operand in row[:num_written]]:
                check_writable(operand)
        work = Work(self.queues[queue], rows, num_written, blocks)
        self._launch(kernel, template, work, scalars, crossing)

    def launch_into_new(
        self, kernel: Kernel, template: Template, row: Row, scalars: Sequence[int | float]
    ) -> None:
        """Launches over one row: a Buffer that was just allocated, and inputs on this device.

        Does what ``launch`` does on the compute queue, without the checks that a new output does
        not need. The other arguments are those of ``launch``; ``row`` is an entry of its ``rows``.
        """
        if row[0].size:
            work = Work(self.compute, [row], kernel.num_written(scalars))
            self._launch(kernel, template, work, scalars, 0)

    def compile_kernel(self, kernel: Kernel, template: Template) -> None:
        """Compiles a kernel for all devices of the mesh before its first launch.

        ``kernel`` and ``template`` are those of ``launch``. The host waits for the compiler.

        Raises:
            BackendUnavailableError: the compiler is missing.
        """
        mesh_state = self.mesh_state
        mesh_state.check_usable(self)
        if (kernel, template) not in mesh_state.compiled:
            self._compile_kernel(kernel, template)
            for device in {each.physical: each for each in self.mesh.devices}.values():
                if device.physical not in mesh_state.failed:
                    with suppress(BackendUnavailableError):  # this call does not need that device
                        device._compile_kernel(kernel, template)
            mesh_state.compiled[kernel, template] = None

    def queue_mark(self, queue: Queue = "compute") -> Mark:
        """For ``order.py`` and backends: returns a ``Mark`` of the present end of ``queue``."""
        self.mesh_state.check_usable(self)
        command_list = self.mesh_state.thread.command_list
        if command_list is None:
            mark = Mark(self, queue, self.mesh_state.order.mark(self.queues[queue]).event)
        else:
            mark = Mark(self, queue, self._mark(queue))
            command_list.note_mark(mark)
        self.mesh_state.log.note_mark(mark)
        return mark

    def queue_wait(self, mark: Mark, *, queue: Queue = "compute") -> None:
        """For ``order.py`` and backends: makes later work of ``queue`` wait for ``mark``."""
        self.mesh_state.check_usable(self)
        self._wait(mark, queue)
        self.queues[queue].submitted += 1
        command_list = self.mesh_state.thread.command_list
        if command_list is not None:
            command_list.note_wait(self, mark, queue)

    def synchronize(self, *, deadline: float | None = None) -> None:
        """Blocks the host until both queues are empty.

        Args:
            deadline: seconds from now; if they pass first, the mesh fails.

        Raises:
            ValueError: ``deadline`` is not a number above 0.
        """
        wait_policy = self._wait_policy(deadline)
        self.mesh_state.check_usable(self)
        log = self.mesh_state.log
        number = log.append(Record("sync", "", self.index))
        generation = self.mesh_state.generation
        if not self._synchronize(wait_policy) or self.mesh_state.has_failed(generation):
            raise self.mesh_state.abort_wait("synchronize", self, wait_policy)
        log.mark_finished(number, self, "compute", "transfer")
        self.drain()
        self.mesh_state.inexact.warn()

    def _wait_policy(self, deadline: float | None) -> WaitPolicy:
        seconds = as_deadline(deadline)
        if seconds is None:
            return self._endless
        self.mesh_state.guard()
        return WaitPolicy(self, seconds)

    def trim(self) -> None:
        """Gives the pool's unused memory back to the system; Buffers keep theirs.

        On a GPU the host may wait for queued work.
        """
        self.mesh_state.check_usable(self)
        self.drop_free_memory()

    def drop_free_memory(self) -> None:
        """Does what ``trim`` does, also for a closed mesh; does nothing on a failed device."""
        if self.physical not in self.mesh_state.failed:
            self.drain()
            self._trim()

    def drain(self) -> None:
        """Returns the memory of freed blocks to the pool.

        The next ``empty`` does it too. Memory that a queue or stream still uses is left for a later
        call.
        """
        self._deferred_free.drain(self)

    # -- the way to the backend -------------------------------------------------------------------

    def _launch(
        self,
        kernel: Kernel,
        template: Template,
        work: Work,
        scalars: Sequence[int | float],
        crossing: int,
    ) -> None:
        """Queues a kernel whose operands are checked, and logs it."""
        if self.compiles and (kernel, template) not in self.mesh_state.compiled:
            self.compile_kernel(kernel, template)
        queue, rows = work.queue, work.rows
        record = Record("launch", kernel.name, self.index, -1, crossing, queue.name, len(rows))
        if kernel.is_weighted:
            record.weight = scalars[0]
        command, table = self._make_launch(kernel, template, rows, scalars, queue.name)
        if table is not None and queue is not self.compute:
            work = work._replace(also_read=(table,))
        self._submit(command, record, work)

    def _submit(
        self,
        command: Command,
        record: Record,
        work: Work,
        *,
        is_ordered: bool = False,
        is_repeated: bool = True,
    ) -> None:
        """Submits an operation, counts it for ``fail_on_partial_write`` and logs it.

        An interrupted operation counts, because it may have begun. On devices that defer work, an
        ``Exception`` means that it has not begun; Ctrl-C may come at any time.

        Args:
            command: queues the operation, each time it is called.
            record: its record.
            work: its operands.
            is_ordered: whether the command queues its waits itself.
            is_repeated: whether steps that are being prepared repeat it.
        """
        log = self.mesh_state.log
        if log.num_traces:
            log.thread.started = time.perf_counter_ns()
        try:
            if is_ordered:
                command()
            else:
                self._order(command, work)
            log.thread.num_submitted += 1
        except BaseException as error:
            log.thread.num_submitted += not (self.defers and isinstance(error, Exception))
            raise
        log.append(record, command if is_repeated else None, work.rows, work.num_written)

    def _order(self, command: Command, work: Work) -> None:
        """Runs a command that uses memory, after the waits that it needs; logs nothing."""
        self.mesh_state.order.run(command, (work,))
