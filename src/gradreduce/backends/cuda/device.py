"""The CUDA device, through CuPy: two streams, a memory pool, copies and launches.

All devices of a mesh on one GPU share its two non-blocking streams. Each device has its own CuPy
memory pool and always allocates on the compute stream, so a freed block can be reused at once.
CuPy's pool knows one stream for each block and has no ``record_stream``: a block that another queue
has used is freed later, by ``Device.drain``, when that queue has passed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy.cuda.function import CNumpyArray as Argument  # CuPy makes one at every launch otherwise

from gradreduce.device import (
    QUEUES,
    Block,
    Buffer,
    Command,
    CommandList,
    DeferInterrupts,
    Device,
    DeviceQueue,
    GpuMove,
    HostCopy,
    HostMove,
    Kernel,
    Mark,
    MeshState,
    Parcel,
    Queue,
    Row,
    Stream,
    StreamCall,
    Tables,
    Template,
    User,
    WaitPolicy,
    Work,
    as_dtype,
    bytes_of,
    handle_of,
    run_in_thread,
)
from gradreduce.errors import BackendUnavailableError, DeviceMismatchError

from .compile import load_kernel
from .geometry import Geometry
from .graph import capture_graph, recording
from .libcuda import is_of_cuda_malloc, uuid_of
from .staging import CHUNK, SMALL, PinnedStaging, allocate_pinned, chunks_of
from .streams import FATAL, GpuScope

# Seconds between two polls of a queue that must be empty before a mesh can be reset.
_LOOK_SECONDS = 1e-3
# Memory that queues of failed meshes may still use. It is added when the mesh fails, because during
# a garbage collection it would be too late, and freed only after its queues have finished.
_RETAINED: dict[int, Any] = {}
# Keeps the streams, the pool and the pinned memory of each device alive until its ``__del__``. The
# garbage collector clears weak references first, such as those of memory to its pool, and calls
# finalizers in any order.
_KEPT: dict[int, Any] = {}


@lru_cache(maxsize=1024)
def _scalar_arguments(
    kernel: Kernel, scalars: tuple[int | float, ...], cache_key: str
) -> tuple[Any, ...]:
    """Converts scalars to the types that the kernel declares, for CuPy.

    Args:
        kernel: the kernel, which declares the types.
        scalars: the scalars to convert.
        cache_key: distinguishes equal scalars with different bits: 0.0 and -0.0.
    """
    kinds: dict[str, Any] = {"int64": np.int64, "float64": np.float64}
    declared = zip(kernel.scalars, scalars, strict=True)
    return tuple(Argument(np.array(value, kinds[kind])) for (_, kind), value in declared)


class _Late:
    """Memory that outlives its mesh: when it ends, it goes back to the driver at once."""

    __slots__ = ("_home", "_memory")

    def __init__(self, home: CudaDevice, memory: Any) -> None:
        self._home = home
        self._memory = memory

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._memory = None  # into the pool
            self._home.free_pool()


class CudaDevice(Device):
    """A logical device on the GPU ``physical``; several may share one GPU.

    Args:
        mesh_state: the state of its mesh.
        index: see ``Device``.
        physical: see ``Device``.
        shared: what the devices on each GPU share: its streams, and the pinned memory of its
            copies. The first device of a GPU adds them.

    Attributes:
        gpu: a context manager that makes the device's GPU current.
    """

    defers = True

    def __init__(
        self,
        mesh_state: MeshState,
        index: int,
        physical: int,
        shared: dict[int, tuple[dict[Queue, Any], PinnedStaging]],
    ) -> None:
        super().__init__(mesh_state, index, physical)
        self.gpu = GpuScope(self)
        with self.gpu:
            if physical not in shared:
                streams = {queue: cupy.cuda.Stream(non_blocking=True) for queue in QUEUES}
                shared[physical] = streams, PinnedStaging()
            self._streams, self._staging = shared[physical]
            self._pool = cupy.cuda.MemoryPool()
        _KEPT[id(self)] = self._streams, self._pool, self._staging
        mesh_state.on_failure.append(self._retain)
        self._geometry = Geometry.of(self.gpu.device.attributes)
        self._tables = Tables(self._place, Argument)

    def close(self) -> None:
        """Waits for queued work, so that its memory is not reused too early.

        Does not wait for a failed mesh, whose queues may never end; their memory is kept.
        """
        with suppress(BackendUnavailableError):  # a failed device has no running work
            if self.mesh_state.reason is None:
                self._synchronize(WaitPolicy(self))
                self.drain()
            elif self._is_idle():
                self._release_retained()

    def __del__(self) -> None:
        """Protects memory that queued work still uses, for a mesh that was not closed."""
        if sys.is_finalizing():
            return
        _kept = _KEPT.pop(id(self), None)  # keeps them alive until this returns
        with suppress(BackendUnavailableError):  # closed, failed, or opened before a fork
            self.mesh_state.check_open()
            # Queues of the others may use this memory. A device that has ended has waited for its
            # own, or has left its memory in `_RETAINED`; its streams may be destroyed.
            # If `open_mesh` has failed there is no mesh.
            mesh = cast("list[CudaDevice]", self.mesh.devices if hasattr(self, "mesh") else [self])
            devices = [each for each in mesh if each is self or id(each) in _KEPT]
            retained = [
                each for each in mesh if each not in devices and id(each._pool) in _RETAINED
            ]
            if self.mesh_state.reason is None:
                self.mesh_state.check_usable(self)
                if self._staging or self._deferred_free.held:
                    for device in devices:
                        device._synchronize(WaitPolicy(device))
            elif not retained and all([each._is_idle(in_finalizer=True) for each in devices]):
                self._release_retained()
            else:
                return
            # CuPy 14.2 never frees what is in a pool that ends.
            self._deferred_free.forget()
            self.free_pool()

    def _retain(self) -> None:
        _RETAINED[id(self._pool)] = (self._pool, self._streams, self._staging, self._deferred_free)

    def _release_retained(self) -> None:
        _RETAINED.pop(id(self._pool), None)

    # -- queues ---------------------------------------------------------------------------------

    def _stream(self, queue: Queue) -> Any:
        """Returns the stream to submit to; inside a capture, the stream that records it."""
        if recording.streams is None:
            return self._streams[queue]
        return recording.streams.get(self.queues[queue], self._streams[queue])

    def _exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: HostMove
    ) -> None:
        """Downloads, moves and uploads; the host waits."""
        outgoing = [(rank, bytes_of(self.download(buffer))) for rank, buffer in sends]
        incoming = [(rank, np.empty(buffer.shape, buffer.dtype)) for rank, buffer in receives]
        move(outgoing, [(rank, bytes_of(array)) for rank, array in incoming])
        for (_, buffer), (_, array) in zip(receives, incoming, strict=True):
            self.upload(array, out=buffer, queue=queue)

    def _exchange_on_gpu(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: GpuMove
    ) -> None:
        command = partial(self._call_on_stream, queue, partial(move, sends, receives))
        self._order(command, self._parcels(sends, receives, queue))

    def _call_on_stream(self, queue: Queue, call: StreamCall) -> None:
        with self.gpu:
            call(self.physical, self._stream(queue).ptr)

    def _hardware_name(self) -> str:
        found = uuid_of(self.physical)
        return found or f"{os.uname().nodename} {runtime.deviceGetPCIBusId(self.physical)}"

    def _activate(self) -> GpuScope:
        return self.gpu

    def _is_capturing(self, stream: Stream) -> bool:
        return self.gpu.is_capturing(stream)

    def _mark(self, queue: User) -> Any:
        return self.gpu.event(self._stream(queue) if queue in QUEUES else queue)

    def _wait(self, mark: Mark, queue: User) -> None:
        stream = self._stream(queue) if queue in QUEUES else queue
        with self.gpu:
            runtime.streamWaitEvent(handle_of(stream), mark.event.ptr)

    def _capture(self, devices: Sequence[Device], command_list: CommandList) -> Command:
        queues = {
            queue: device.gpu
            for device in cast("Sequence[CudaDevice]", devices)
            for queue in device.queues.values()
        }
        return capture_graph(command_list, queues, self._streams["compute"])

    # -- memory ---------------------------------------------------------------------------------

    def _adopt(self, array: Any, writable: bool) -> Buffer:
        if not isinstance(array, cupy.ndarray):
            raise DeviceMismatchError(f"{self.name} holds CuPy arrays, not {type(array).__name__}")
        dtype = as_dtype(array.dtype)
        if array.device.id != self.physical:
            raise DeviceMismatchError(
                f"the array is on GPU {array.device.id}, but {self.name} is on GPU "
                f"{self.physical}: copy the array there"
            )
        if not array.flags.c_contiguous:
            raise ValueError("an adopted array must be contiguous in C order: pass a copy")
        address, nbytes = array.data.ptr, array.nbytes
        if self.external_buffers.is_used and writable:
            block = self.external_buffers.find(address, nbytes)
            if block is not None and block.device is self:
                return Buffer(block, address - block.address, array.shape, dtype)
        block = Block(self, array, address, nbytes, owned=False, writable=writable)
        if self.mesh_state.peer_access and nbytes:  # else it is not needed
            with self.gpu:
                block.peer_mapped = is_of_cuda_malloc(address)
        return Buffer(self._deferred_free.track(block), 0, array.shape, dtype, array)

    def _array_of(self, buffer: Buffer) -> Any:
        if buffer.array is not None:
            return buffer.array
        memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, buffer.block, self.physical)
        return cupy.ndarray(buffer.shape, buffer.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def put_all(
        self, arrays: Sequence[Any], addresses: Sequence[int] | None = None
    ) -> list[Buffer]:
        """See ``Backend.put_all``: a CuPy array of this GPU is shared if contiguous, else copied.

        The compute queue waits for CuPy's current stream. Host arrays are copied.

        Raises:
            DeviceMismatchError: an array is on another GPU.
        """
        return [self._put(array) for array in arrays]

    def _put(self, array: Any) -> Buffer:
        if not isinstance(array, cupy.ndarray):
            return self.upload(np.asarray(array))
        stream = cupy.cuda.get_current_stream(array.device.id)
        if array.device.id == self.physical and not array.flags.c_contiguous:
            self.mesh_state.check_usable(self)
            self.check_stream(stream)
            with self.gpu:
                array = cupy.ascontiguousarray(array)
        return self.adopt(array, stream)

    def _allocate(self, nbytes: int) -> Block:
        self.drain()
        try:
            with self.gpu, self._streams["compute"]:
                pointer = self._pool.malloc(max(1, nbytes))
        except MemoryError as error:
            raise MemoryError(self._shortage(nbytes)) from error
        self.mesh_state.order.add_work(self.compute)  # memory comes in stream order
        block = Block(self, pointer, pointer.ptr, nbytes, owned=True, writable=True)
        self._deferred_free.track(block).raw = None  # kept by what remains of the block
        return block

    def _shortage(self, nbytes: int) -> str:
        colocated = [each for each in self.mesh.devices if each.physical == self.physical]
        with self.gpu:
            free, total = runtime.memGetInfo()
            held = sum(
                each._pool.total_bytes() for each in colocated if isinstance(each, CudaDevice)
            )
        return (
            f"{self.name}: GPU {self.physical} cannot allocate {nbytes:,} bytes: {free:,} of "
            f"{total:,} are free, this mesh holds {held:,}. To free memory, drop Buffers, or "
            "call trim() of other meshes or torch.cuda.empty_cache()"
        )

    def _trim(self) -> None:
        """Also frees memory that queued work still uses: cudaFree waits for the GPU."""
        if id(self._pool) in _RETAINED:
            return
        self.drain()
        if self.mesh_state.is_closed:  # nothing drains later
            self._deferred_free.leave(partial(_Late, self))
            self.drain()
        with self.gpu:
            self._deferred_free.join(self, self._streams["compute"].wait_event)
            self._pool.free_all_blocks()

    def free_pool(self) -> None:
        """Gives the pool's memory back to the driver, also in a finalizer."""
        failed = self.mesh_state.is_inherited or self.physical in self.mesh_state.failed
        with suppress(BackendUnavailableError, runtime.CUDARuntimeError):
            if not failed:
                with self.gpu:
                    self._pool.free_all_blocks()

    def _fill_zero(self, buffer: Buffer) -> None:
        with self.gpu:
            runtime.memsetAsync(buffer.address, 0, buffer.nbytes, self._stream("compute").ptr)

    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        """Uploads through pinned memory; large arrays in chunks that may wait for earlier ones."""
        if not dst.nbytes:
            return
        for offset, chunk in chunks_of(array, dst.dtype):
            nbytes = chunk.nbytes
            if nbytes >= SMALL:
                self._limit_pinned()
            with DeferInterrupts(), self.gpu:
                pinned = allocate_pinned(nbytes, self.name)
                staged = np.frombuffer(pinned, np.uint8, nbytes)
                staged.view(dst.dtype).reshape(chunk.shape)[...] = chunk
                command = partial(self._upload_pinned, dst.address + offset, pinned, nbytes, queue)
                self._order(command, Work(self.queues[queue], [(dst,)], 1))
                self._staging.drop()

    def _upload_pinned(self, address: int, pinned: Any, nbytes: int, queue: Queue) -> None:
        stream = self._stream(queue)
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(address, pinned.ptr, nbytes, kind, stream.ptr)
        self._staging.add(pinned, nbytes, self.gpu.event(stream))

    def _limit_pinned(self) -> None:
        """Waits while too much pinned memory is in use."""
        while (event := self._staging.oldest()) is not None:
            if not self._endless.polls:
                with self.gpu:
                    event.synchronize()
            elif not self._endless.until(partial(self._is_done, event)):
                raise self.mesh_state.abort_wait("an upload", self, self._endless)
            self._drop_staging()

    def _drop_staging(self) -> None:
        with self.gpu:
            self._staging.drop()

    def _download(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        nbytes, polls = buffer.nbytes, wait_policy.polls
        stream = self._stream("compute")
        if polls and nbytes > CHUNK:
            return self._download_beside(buffer, wait_policy)
        with DeferInterrupts(), self.gpu:
            if polls:  # a copy to pageable memory waits in the driver
                pinned = allocate_pinned(max(1, nbytes), self.name)
                host = np.frombuffer(pinned, np.uint8, nbytes)
            else:
                host = np.empty(nbytes, np.uint8)
            if nbytes:
                runtime.memcpyAsync(
                    host.ctypes.data, buffer.address, nbytes,
                    runtime.memcpyDeviceToHost, stream.ptr,
                )  # fmt: skip
            if polls:  # the copy may still write it after the wait has ended early
                self._staging.add(pinned, nbytes, self.gpu.event(stream))
        if not self._host_waits(wait_policy, [stream]):
            return None
        self._drop_staging()
        host = host.view(buffer.dtype).reshape(buffer.shape)
        return host.copy() if polls else host

    def _download_beside(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        """Downloads without pinned memory: in a thread, because the driver's wait has no timeout.

        In one copy, so that no later work of the queue comes in between.
        """
        host, stream = np.empty(buffer.nbytes, np.uint8), self._streams["compute"]
        failed: list[BaseException] = []

        def copy() -> None:
            try:
                with self.gpu:
                    runtime.memcpyAsync(
                        host.ctypes.data, buffer.address, buffer.nbytes,
                        runtime.memcpyDeviceToHost, stream.ptr,
                    )  # fmt: skip
                    self.gpu.event(stream).synchronize()
            except BaseException as error:
                failed.append(error)

        if not self._host_waits(wait_policy, [stream]):  # then the copy waits for little
            return None
        if not wait_policy.until(run_in_thread(copy).is_set):
            return None
        if failed:
            raise failed[0]
        return host.view(buffer.dtype).reshape(buffer.shape)

    def _make_download(self, buffer: Buffer) -> tuple[Command, HostCopy]:
        nbytes, events = buffer.nbytes, list[Any]()
        with self.gpu:
            pinned = allocate_pinned(nbytes, self.name)

        def command() -> None:
            stream, kind = self._stream("compute"), runtime.memcpyDeviceToHost
            with DeferInterrupts(), self.gpu:
                runtime.memcpyAsync(pinned.ptr, buffer.address, nbytes, kind, stream.ptr)
                events.append(self.gpu.event(stream))
                self._staging.add(pinned, nbytes, events[0])  # the copy may outlive its reader

        def read() -> np.ndarray | None:
            if not events or not self._is_done(events[0]):
                return None
            return np.frombuffer(pinned, buffer.dtype, buffer.size).copy()

        return command, read

    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        stream = self._stream(queue).ptr
        with self.gpu:
            is_local = dst.device.physical == src.device.physical
            if is_local or recording.streams is not None:  # a graph takes no memcpyPeerAsync
                kind = runtime.memcpyDeviceToDevice if is_local else runtime.memcpyDefault
                runtime.memcpyAsync(dst.address, src.address, dst.nbytes, kind, stream)
            else:
                runtime.memcpyPeerAsync(
                    dst.address, dst.device.physical, src.address, src.device.physical,
                    dst.nbytes, stream,
                )  # fmt: skip

    # -- work -----------------------------------------------------------------------------------

    def _compile_kernel(self, kernel: Kernel, template: Template) -> None:
        with self.gpu:
            load_kernel(kernel, template, self.physical, self._geometry.threads)

    def _make_launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> tuple[Command, Buffer | None]:
        with (
            self.gpu,
            self.mesh_state.recording_commands(None),
        ):  # a table is uploaded once and used often
            geometry = self._geometry
            function, blocks = load_kernel(kernel, template, self.physical, geometry.threads)
            items = kernel.num_items(rows)
            total, itemsize = sum(items), min([each.dtype.itemsize for each in rows[0]])
            chunk_size = geometry.chunk_size(
                total, itemsize, blocks, long_items=kernel.items is not None
            )
            table = self._tables.find(rows, items, chunk_size)
            # 0.0 == -0.0, but products with them differ: distinguish such scalars by their text.
            cache_key = repr(scalars) if 0 in scalars else ""
            arguments = (table.argument, *_scalar_arguments(kernel, tuple(scalars), cache_key))
        block = geometry.block(total, table.num_chunks, itemsize)
        grid, threads = (table.num_chunks,), (block,)

        def command(_held: object = table.held) -> None:
            with self.gpu:
                function(grid, threads, arguments, stream=self._stream(queue))

        return command, table.held

    def _place(self, words: np.ndarray) -> tuple[int, Buffer]:
        held = self.upload(words)
        return held.address, held

    def _is_done(self, event: Any) -> bool:
        """See ``Backend._is_done``; marks a GPU as failed after a fatal error."""
        with self.gpu:  # CUDA makes a context on the current GPU, whatever the event's
            return self._is_over(runtime.eventQuery(event.ptr))

    def _is_over(self, status: int) -> bool:
        """Whether a query's status means done; a fatal error marks the GPU as failed."""
        if status in FATAL:
            self.mesh_state.mark_failed(self.physical, str(runtime.CUDARuntimeError(status)))
        return status == 0

    def _synchronize(self, wait_policy: WaitPolicy, queues: Sequence[Queue] = QUEUES) -> bool:
        if not self._host_waits(wait_policy, [self._streams[queue] for queue in queues]):
            return False
        self._drop_staging()
        return True

    def _host_waits(self, wait_policy: WaitPolicy, streams: Iterable[Any]) -> bool:
        """Waits on the host; in the driver only if no deadline was ever set."""
        if not wait_policy.polls:
            with self.gpu:
                for stream in streams:
                    stream.synchronize()
            return True
        with self.gpu:
            events = [self.gpu.event(stream) for stream in streams]
        return wait_policy.until(lambda: all(self._is_done(event) for event in events))

    def _is_idle(self, *, in_finalizer: bool = False) -> bool:
        """Whether all queues are empty; in a finalizer events may be destroyed already."""
        try:
            with self.gpu:
                if in_finalizer:
                    statuses = [
                        runtime.streamQuery(stream.ptr) for stream in self._streams.values()
                    ]
                else:
                    statuses = [self._query(queue) for queue in self.queues.values()]
        except BackendUnavailableError:  # the GPU has failed
            return False
        return all([self._is_over(status) for status in statuses])

    def _query(self, queue: DeviceQueue) -> int:
        """Returns CUDA's status of all work of a queue: 0 if it is done.

        ``streamQuery`` keeps the interpreter's lock and, if another thread launches into a full
        queue, waits for it. Recording an event waits too, so an earlier one is queried first.
        """
        order = self.mesh_state.order
        _, earlier = order.waits.marks.get(queue, (0, None))
        status = 0 if earlier is None else int(runtime.eventQuery(earlier.event.ptr))
        if status:
            return status
        event = order.mark(queue).event  # must live until it was queried
        return int(runtime.eventQuery(event.ptr))

    def _abandon(self, seconds: float) -> bool:
        """Drops nothing: aborted collectives end, and later work runs."""
        end = time.monotonic() + seconds
        while not self._is_idle():
            if self.physical in self.mesh_state.failed:
                break  # a failed GPU never becomes idle, and stays failed
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_SECONDS)
        self._drop_staging()
        self._release_retained()
        return True
