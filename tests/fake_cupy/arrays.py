"""Device memory with the interface of CuPy: pools, pointers, pinned memory, a minimal ndarray."""

import ctypes
import gc
import itertools
import weakref
from functools import cache
from types import SimpleNamespace

import numpy as np

from . import graphs
from .computing import Computing
from .machine import READ, WRITE, Call, current
from .memory import PINNED, REGION
from .surface import (
    LEGACY,
    CUDARuntimeError,
    Device,
    check_addresses,
    get_current_stream,
    getDevice,
    queue_of,
    streamWaitEvent,
)


class OutOfMemoryError(MemoryError):
    """CuPy's OutOfMemoryError, with the figures of one pool."""

    def __init__(self, size, total, limit=0):
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes)."
        )


class _Memory:
    """An allocation; it returns to its pool when it is freed.

    Raises:
        MemoryError: the GPU has no more.
    """

    def __init__(self, pool, size: int) -> None:
        self._machine = machine = current()
        self._pool = pool.ref
        # By stream, like CuPy's arenas.
        self._home = queue_of(machine, None)
        self.device_id = getDevice()
        if self._home.gpu != self.device_id:
            machine.fail(f"wrong device: memory of GPU {self.device_id} in the order of another")
        self._chunk = machine.allocate(pool.key, self.device_id, size, self._home)
        self.ptr = self._chunk.start
        self.size = size

    def __del__(self) -> None:
        if hasattr(self, "_chunk"):
            is_alive = self._pool() is not None
            self._machine.free_later(self._chunk, self._home, is_alive=is_alive)


class UnownedMemory:
    """Memory of another owner, which it keeps alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        check_addresses(ptr)
        self.ptr = ptr
        self.size = size
        self._owner = owner
        place = REGION.place(ptr)
        if size and place != (getDevice() if device_id < 0 else device_id):
            current().fail(f"wrong device: UnownedMemory of GPU {device_id} lies on {place}")
        self.device_id = place if size else device_id


class MemoryPointer:
    """An address inside some memory."""

    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self):
        return Device(self.device_id)


class MemoryPool:
    """A pool with one free list per stream: memory is reused in the order of its stream.

    Like CuPy 14.2's: free memory of a pool that has ended is lost (its arenas and chunks own each
    other), and memory that is freed later goes to CUDA, unless it is a part of a larger one.
    """

    _keys = itertools.count()

    def __init__(self, allocator=None):
        self.key = next(self._keys)
        self.ref = weakref.ref(self)  # the collector clears one that only garbage refers to

    def malloc(self, size):
        with current().entered() as machine:
            machine.count("malloc")
            for attempt in range(3):
                try:
                    memory = _Memory(self, size)
                except MemoryError:
                    if attempt:
                        gc.collect()
                    machine.free_all(self.key, getDevice())
                else:
                    return MemoryPointer(memory, 0)
            raise OutOfMemoryError(size, self.total_bytes())

    def free_all_blocks(self, stream=None):
        with current().entered(frees=False) as machine:
            machine.count("free_all_blocks")
            machine.free_all(self.key, getDevice())

    def total_bytes(self):
        return current().heap.used(getDevice(), self.key)


_default_pool = MemoryPool()


@cache
def _pinned_class(size: int) -> type:
    """A class for one size, because only ctypes arrays provide the buffer protocol."""

    def ends(self) -> None:
        if hasattr(self, "_chunk"):
            self._machine.free_later(self._chunk, None)

    return type("PinnedMemoryPointer", (ctypes.c_ubyte * size,), {"__del__": ends})


def alloc_pinned_memory(size):
    """From CuPy's pool: sizes are powers of two; free memory goes back only if there is no more."""
    with current().entered() as machine:
        for attempt in range(2):
            try:
                chunk = machine.allocate("pinned", PINNED, size, None)
                break
            except MemoryError:
                if attempt:
                    raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2) from None
                machine.heap.release(machine.heap.whole("pinned", PINNED))
        pinned = _pinned_class(size).from_buffer(REGION.map, chunk.start - REGION.start)
        pinned.ptr, pinned._machine, pinned._chunk = chunk.start, machine, chunk
        return pinned


# -- the copies of cupy.cuda.runtime --------------------------------------------------------------

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4
CUDA_DLPACK = 2  # kDLCUDA


def _on_device(place: int) -> bool:
    return 0 <= place < PINNED


def memcpyAsync(dst, src, size, kind, stream):
    """``runtime.memcpyAsync``."""
    check_addresses(dst, src, stream)
    if size < 0:
        raise OverflowError("can't convert negative value to size_t")
    with current().entered() as machine:
        queue = _checked_queue(machine, "memcpyAsync", stream)
        to, of = REGION.place(dst), REGION.place(src)
        wanted = {memcpyHostToDevice: (False, True), memcpyDeviceToHost: (True, False),
                  memcpyDeviceToDevice: (True, True)}.get(kind)  # fmt: skip
        if queue.capture is not None and min(of, to) < 0:
            machine.fail("capture: memcpyAsync of pageable memory")
        if kind != memcpyDefault and wanted != (_on_device(of), _on_device(to)):
            machine.fail(f"memcpyAsync of kind {kind} from place {of} to {to}")
        if kind == memcpyDeviceToDevice and to != of:
            machine.fail("memcpyAsync between two GPUs; that is memcpyPeerAsync's")
        pageable = ctypes.string_at(src, size) if of < 0 else None

        def work(call: Call) -> None:
            accesses = [] if of < 0 else [(src, src + size, READ)]
            accesses += [] if to < 0 else [(dst, dst + size, WRITE)]
            machine.check(call, accesses if size else [])
            ctypes.memmove(dst, src if pageable is None else pageable, size)

        machine.count("memcpy")
        call = machine.submit(queue, "memcpyAsync", work)
        if to < 0:  # pageable host memory: CUDA returns after the copy
            machine.finish(call)


def memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, stream):
    """``runtime.memcpyPeerAsync``; needs no peer access."""
    check_addresses(dst, src, stream)
    with current().entered() as machine:
        queue = _checked_queue(machine, "memcpyPeerAsync", stream)
        if queue.capture is not None:
            machine.fail("capture: memcpyPeerAsync, which CUDA does not capture")
        if (REGION.place(dst), REGION.place(src)) != (dstDevice, srcDevice):
            machine.fail(f"memcpyPeerAsync: the memory is not of GPUs {dstDevice}, {srcDevice}")

        def work(call: Call) -> None:
            accesses = [(src, src + size, READ), (dst, dst + size, WRITE)]
            machine.check(call, accesses, peers_matter=False)
            ctypes.memmove(dst, src, size)
            pair = (queue.gpu, srcDevice if queue.gpu == dstDevice else dstDevice)
            if pair in machine.corrupt & machine.peers:
                ctypes.memset(dst, 0x5A, size)

        machine.count("memcpyPeer")
        machine.submit(queue, "memcpyPeerAsync", work)


def memsetAsync(ptr, value, size, stream):
    """``runtime.memsetAsync``."""
    check_addresses(ptr, stream)
    with current().entered() as machine:
        queue = _checked_queue(machine, "memsetAsync", stream)

        def work(call: Call) -> None:
            machine.check(call, [(ptr, ptr + size, WRITE)])
            ctypes.memset(ptr, value, size)

        machine.submit(queue, "memsetAsync", work)


def _checked_queue(machine, what: str, stream):
    """CUDA accepts some copies with another current device; our code always sets it."""
    queue = queue_of(machine, stream)
    if queue.gpu != getDevice():
        machine.fail(
            f"wrong device: {what} on {queue} of GPU {queue.gpu}, current is {getDevice()}"
        )
    return queue


class ndarray(Computing):
    """The part of ``cupy.ndarray`` that our code and tests use: views, fills, copies, arithmetic.

    What it does, it does in the order of the current stream.
    """

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.data = _default_pool.malloc(self.nbytes) if memptr is None else memptr
        whole = _row_major(self.shape, self.dtype.itemsize)
        self.strides = whole if strides is None else strides
        self.flags = SimpleNamespace(c_contiguous=self.strides == whole or self.size == 0)

    @property
    def device(self):
        return self.data.device

    def __getitem__(self, key):
        within = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, list | np.ndarray) for each in within):
            return self._gathered(key)
        whole = within if Ellipsis in within else (*within, Ellipsis)  # an element is a view too
        view = self._memory()[whole]
        if min(view.strides, default=0) < 0:
            return self._gathered(key)
        offset = view.__array_interface__["data"][0] - self.data.mem.ptr
        return ndarray(view.shape, self.dtype, MemoryPointer(self.data.mem, offset), view.strides)

    def __setitem__(self, key, value):
        if isinstance(value, ndarray):
            source = value._memory()
            value._submit("read", READ, lambda memory: None)
            self._submit("copy", WRITE, lambda memory: memory.__setitem__(key, source))
            return
        view = self[key]
        view._submit("fill", WRITE, lambda memory: np.copyto(memory, value))

    def view(self, dtype=None):
        """Views the same bytes as another dtype of the same width."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            raise NotImplementedError("the fake views dtypes of one width")
        return ndarray(self.shape, dtype, self.data, self.strides)

    def transpose(self, *axes):
        """A view with another order of axes, passed as one tuple."""
        (order,) = axes
        shape, strides = (tuple(of[axis] for axis in order) for of in (self.shape, self.strides))
        return ndarray(shape, self.dtype, self.data, strides)

    def get(self):
        """A host copy, for which the host waits."""
        host = np.empty(self.shape, self.dtype)
        call = self._submit("get", READ, lambda memory: np.copyto(host, memory))
        with current().entered() as machine:
            graphs.check_safe(machine, "the host waits for a copy")
            machine.finish(call)
        return host

    def copy(self):
        """Copies to the *current* GPU, wherever the array is, like CuPy."""
        made = ndarray(self.shape, self.dtype)
        source = self._memory()
        self._submit("read", READ, lambda memory: None)
        made._submit("copy", WRITE, lambda memory: np.copyto(memory, source))
        return made

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The consumer's stream waits for the current stream of the *current* GPU, as in CuPy."""
        consumer = LEGACY if stream is None else stream
        ours = get_current_stream()
        if consumer not in (-1, ours.ptr or LEGACY):
            event = ours.record()
            streamWaitEvent(consumer, event.ptr)
        return self

    def __dlpack_device__(self):
        return CUDA_DLPACK, self.device.id

    def _memory(self) -> np.ndarray:
        """The array's memory as a NumPy array."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        extent = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        raw = (ctypes.c_ubyte * (extent + self.dtype.itemsize)).from_address(self.data.ptr)
        return np.ndarray(self.shape, self.dtype, raw, strides=self.strides)

    def _submit(self, what: str, kind: int, use) -> Call:
        memory = self._memory()
        base = memory.__array_interface__["data"][0]
        width = self.dtype.itemsize
        if self.flags.c_contiguous:
            accesses = [(base, base + self.nbytes, kind)] if self.size else []
        else:
            starts = [base + int(np.dot(place, self.strides)) for place in np.ndindex(self.shape)]
            accesses = [(start, start + width, kind) for start in starts]

        def work(call: Call) -> None:
            machine.check(call, accesses)
            use(memory)

        with current().entered() as machine, self.device:
            return machine.submit(queue_of(machine, None), f"cupy {what}", work)


def _row_major(shape: tuple, itemsize: int) -> tuple:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def asarray(host):
    """A CuPy array of the current GPU with a copy of a host array, on the current stream."""
    made = ndarray(host.shape, host.dtype)
    made[...] = host.copy()
    return made


def ascontiguousarray(array):
    """A copy in one piece, on the current GPU and stream."""
    return array.copy()


def from_dlpack(array, *, device=None, copy=None):
    """Shares another library's array, which that library orders with the current stream.

    In the fake an exchange capsule is an ``ndarray`` on the shared memory.
    """
    kind, gpu = array.__dlpack_device__()
    if kind != CUDA_DLPACK:
        raise TypeError("CPU arrays cannot be directly imported to CuPy.")
    with Device(gpu):
        stream = get_current_stream().ptr or LEGACY
        try:
            return array.__dlpack__(stream=stream, max_version=(1, 0), copy=copy)
        except TypeError:  # a library from before DLPack 1.0
            if copy is not None:
                raise
            return array.__dlpack__(stream=stream)


def memGetInfo():
    """``runtime.memGetInfo``."""
    with current().entered() as machine:
        heap = machine.heap
        return heap.capacity - heap.used(getDevice()), heap.capacity


def unmap(array) -> None:
    """Treats an array's memory as of ``cudaMallocAsync``, which no peer may access."""
    current().heap.find(array.data.ptr).is_mapped = False


class DriverLibrary:
    """``libcuda``, as ``ctypes`` sees it."""

    IS_LEGACY_CUDA_IPC_CAPABLE = 10

    def cuPointerGetAttribute(self, answer, attribute, address) -> int:
        assert attribute == self.IS_LEGACY_CUDA_IPC_CAPABLE
        slot = current().heap.find(address.value)
        answer._obj.value = int(slot is not None and slot.is_mapped)
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, active) -> int:
        active._obj.value = int(device in current().contexts)
        return 0

    def cuDeviceGetUuid(self, uuid, device) -> int:
        uuid._obj[0], uuid._obj[15] = 0xAB, device
        return 0


class CDLL(ctypes.CDLL):
    """``ctypes.CDLL``, which finds the fake's driver."""

    def __new__(cls, name=None, *arguments, **options):
        if name == "libcuda.so.1":
            return DriverLibrary()
        return super().__new__(cls)
