"""The parts of ``cupy`` and ``cupy.cuda`` that the CUDA backend uses, on the current machine.

Objects remember their machine; using one after its machine was replaced is a fault.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from typing import Any

from . import graphs
from .machine import Call, Machine, Queue, current


class CUDARuntimeError(RuntimeError):
    """Like CuPy's: the text begins with CUDA's name of the error, ``status`` is its number.

    CuPy's takes the number alone, and finds the text by itself.
    """

    def __init__(self, text: str | int, status: int = 1) -> None:
        if isinstance(text, int):
            text, status = f"cudaError{text}: as the driver calls it", text
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    """Like CuPy's, for calls of the driver, not the runtime: launches, loading of modules."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: as the driver calls it")
        self.status = status


def check_addresses(*values):
    """CuPy's ``intptr_t`` parameters take Python integers, and not NumPy's."""
    for value in values:
        if not isinstance(value, int):
            raise TypeError("an integer is required")


class _Local(threading.local):
    """The state of CUDA and CuPy for each host thread."""

    def __init__(self) -> None:
        self.gpu = 0
        self.devices: list[int] = []
        self.streams: dict[int, Any] = {}
        self.per_thread: dict[tuple[Machine, int], Queue] = {}
        self.stack: list[tuple[int, Any]] = []


_local = _Local()


def forget() -> None:
    """Forgets the current streams of the old machine (in the thread that runs tests)."""
    _local.__init__()


def getDevice():
    return _local.gpu


Machine.current_gpu = staticmethod(getDevice)


def setDevice(device):
    if not 0 <= device < current().num_gpus:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    machine = current()
    machine.make_context(device)
    _local.gpu = device
    if device in machine.freed:
        raise CUDARuntimeError(machine.freed[device].status)


def getDeviceCount():
    return current().num_gpus


def deviceCanAccessPeer(device, peerDevice):
    return int(current().can_peer and device != peerDevice)


def deviceEnablePeerAccess(peerDevice):
    pair = (getDevice(), peerDevice)
    if pair in current().peers:
        raise CUDARuntimeError(704)
    if not deviceCanAccessPeer(*pair):
        raise CUDARuntimeError(217)
    if sum(pair[0] == here for here, _ in current().peers) >= current().most_peers:
        raise CUDARuntimeError(711)
    current().peers.add(pair)


def deviceDisablePeerAccess(peerDevice):
    current().peers.remove((getDevice(), peerDevice))


def driverGetVersion():
    return 13010


def runtimeGetVersion():
    return 12090


def is_available():
    return True


is_hip = False
RANGES: list[str] = []  # "+text" of each range that was begun, "-" of each that was ended


def RangePush(message, id_color=-1):
    RANGES.append(f"+{message}")


def RangePop():
    RANGES.append("-")


def getDeviceProperties(device):
    return {"name": b"Fake GPU", "major": 9, "minor": 0, "totalGlobalMem": 1 << 30}


def deviceGetPCIBusId(device):
    return f"0000:{device:02x}:00.0"


class Device:
    """A GPU; ``with`` makes it the current one of the thread."""

    def __init__(self, device=None):
        self.id = getDevice() if device is None else int(device)

    def __int__(self):
        return self.id

    def __enter__(self):
        _local.devices.append(_local.gpu)
        setDevice(self.id)
        return self

    def __exit__(self, *exc):
        _local.gpu = _local.devices.pop()

    def use(self):
        setDevice(self.id)

    def synchronize(self):
        with current().entered() as machine:
            graphs.check_synchronize(machine, self.id)
            for queue in list(machine.queues.values()):
                if queue.gpu == self.id:
                    machine.finish(queue.last)

    @property
    def compute_capability(self):
        return "90"

    @property
    def attributes(self):
        return {
            "MultiProcessorCount": 4,
            "MaxThreadsPerBlock": 1024,
            "MaxThreadsPerMultiProcessor": 2048,
            "WarpSize": 32,
        }


NULL, LEGACY, PER_THREAD = 0, 1, 2  # handles of default streams: of the GPU current at each call


class _BaseStream:
    """The common base of ``Stream`` and ``ExternalStream``."""

    ptr: int
    device_id: int
    _home: Machine | None  # None: a default stream, of every machine

    @property
    def _machine(self) -> Machine:
        return self._home or current()

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return hash(self.ptr)

    def __enter__(self):
        gpu = self._checked_gpu()
        _local.stack.append((gpu, _local.streams.get(gpu)))
        _local.streams[gpu] = self
        return self

    def __exit__(self, *exc):
        gpu, before = _local.stack.pop()
        _local.streams[gpu] = before

    def _checked_gpu(self):
        gpu, queue = getDevice(), queue_of(current(), self)
        if queue.gpu != gpu:
            current().fail(f"wrong device: {queue} of GPU {queue.gpu} made current on GPU {gpu}")
        return gpu

    def synchronize(self):
        with self._machine.entered() as machine:
            machine.count("synchronize")
            queue = queue_of(machine, self)
            graphs.check_synchronize(machine, queue.gpu, queue)
            graphs.check_safe(machine, f"the host waits for {queue}")
            machine.finish(queue.last)

    def begin_capture(self, mode=None):
        with self._machine.entered() as machine:
            queue = queue_of(machine, self)
            if queue.handle < machine.num_gpus:
                raise RuntimeError("cannot capture on the default (legacy) stream")
            if queue.gpu != getDevice():
                machine.fail(f"wrong device: {queue} of GPU {queue.gpu} begins to record")
            graphs.begin(machine, queue, graphs.RELAXED if mode is None else mode)

    def end_capture(self):
        with self._machine.entered() as machine:
            return graphs.end(machine, queue_of(machine, self))

    def wait_event(self, event):
        _wait(self._machine, self, event)

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event


class Stream(_BaseStream):
    """A stream of the current GPU. Blocking ones are refused: they wait for the null stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if null or ptds:
            self.ptr, self.device_id, self._home = NULL if null else PER_THREAD, -1, None
            return
        self._home, self.device_id = current(), getDevice()
        with self._machine.entered() as machine:
            if not non_blocking:
                machine.fail("a blocking stream waits for the null stream; say non_blocking=True")
            self.ptr = machine.add_queue(self.device_id, "stream").handle

    def __del__(self):
        # No lock while an object is freed. Its work still runs, but nothing may refer to it again.
        if getattr(self, "ptr", NULL) not in (NULL, PER_THREAD):
            self._machine.destroyed.add(self.ptr)


Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)


class ExternalStream(_BaseStream):
    """A stream of another library, by its handle."""

    def __init__(self, ptr, device_id=-1):
        warnings.warn("ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
        self._home, self.ptr, self.device_id = current(), ptr, device_id


_handles = itertools.count(0x1000)
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
NOT_READY = 600


def eventQuery(event):
    """``runtime.eventQuery``: 0, cudaErrorNotReady, or the GPU's error; never raises."""
    check_addresses(event)
    found = _events[event]
    with found._machine.entered() as machine:
        if found._call is None:
            machine.fail("asked whether an event never recorded has passed")
        return _status(machine, found._call)


def streamQuery(stream):
    """``runtime.streamQuery``: like ``eventQuery``, for all work of the stream."""
    check_addresses(stream)
    with current().entered() as machine:
        queue = queue_of(machine, stream)
        if machine.is_full(queue):  # an H100 answered when it was not full any more
            machine.fail(f"streamQuery stops the interpreter: {queue} is full")
        if queue.last is None:
            return _refusal(machine, None, queue)
        return _status(machine, queue.last, queue)


def eventRecord(event, stream):
    """``runtime.eventRecord``."""
    check_addresses(event, stream)
    _events[event].record(stream)


def streamWaitEvent(stream, event, flags=0):
    """``runtime.streamWaitEvent``."""
    check_addresses(stream, event)
    _wait(current(), stream, _events[event])


def _wait(of: Machine, stream, event: Event) -> None:
    with of.entered() as machine:
        queue = queue_of(machine, stream)
        if event._call is None:
            machine.fail(f"{queue} waits for an event never recorded")
        if event._machine is not machine:
            machine.fail("an event of a machine that has ended")
        machine.count("wait")
        machine.wait(queue, event._call)


def streamIsCapturing(stream):
    """``runtime.streamIsCapturing``."""
    check_addresses(stream)
    with current().entered() as machine:
        machine.count("is_capturing")
        return graphs.is_capturing(machine, queue_of(machine, stream))


def _status(machine: Machine, call: Call, queue: Queue | None = None) -> int:
    refusal = _refusal(machine, call, queue)
    if refusal:
        return refusal
    if call.queue.gpu in machine.freed:
        return machine.freed[call.queue.gpu].status
    return 0 if machine.polled(call, waits=True) else NOT_READY


def _refusal(machine: Machine, call: Call | None, queue: Queue | None = None) -> int:
    """The error of a query of a call or queue; 0 if CUDA can answer."""
    captured = graphs.event_status(call)
    if captured:
        return captured
    try:
        if queue is not None:
            graphs.check_synchronize(machine, queue.gpu, queue)
        graphs.check_safe(machine, "a query")
    except CUDARuntimeError as error:
        return error.status
    return 0


class Event:
    """A position in a stream, once recorded. It belongs to the GPU that was current at first."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._machine = current()
        self._gpu = getDevice()
        self.ptr = next(_handles)
        _events[self.ptr] = self
        self._call: Call | None = None
        self._timed = not disable_timing
        self._reached = 0.0  # when its call ran, by the host's clock

    def record(self, stream=None):
        with self._machine.entered() as machine:
            queue = queue_of(machine, stream)
            if queue.gpu != self._gpu:
                machine.fail(
                    f"wrong device: an event of GPU {self._gpu} recorded on {queue} of GPU "
                    f"{queue.gpu}"
                )
            machine.count("record")
            self._call = machine.submit(queue, "event", self._reach)

    def _reach(self, call):
        self._reached = time.perf_counter()

    @property
    def done(self):
        with self._machine.entered() as machine:
            if self._call is None:
                machine.fail("asked whether an event never recorded has passed")
            if _refusal(machine, self._call):
                return False
            return machine.polled(self._call)

    def synchronize(self):
        with self._machine.entered() as machine:
            if self._call is None:
                machine.fail("waited for an event never recorded")
            graphs.check_safe(machine, "the host waits for an event")
            machine.finish(self._call)


def get_elapsed_time(start_event, end_event):
    """Milliseconds between two events: the host's time for the fake's work."""
    with current().entered() as machine:
        for event in (start_event, end_event):
            if event._call is None or not event._call.passed:
                machine.fail("the time of an event that has not passed")
            if not event._timed:
                machine.fail("the time of an event made with disable_timing=True")
    return (end_event._reached - start_event._reached) * 1e3


def get_current_stream(device_id=-1):
    gpu = getDevice() if device_id < 0 else device_id
    return _local.streams.get(gpu) or Stream.null


def queue_of(machine: Machine, stream: Any) -> Queue:
    """The queue of a CuPy stream, a raw handle, or (None) of the current stream.

    CUDA sees the handle alone. That of a default stream names the one of the *current* GPU.
    """
    if stream is None:
        stream = get_current_stream()
    if isinstance(stream, _BaseStream) and stream._machine is not machine:
        machine.fail("a stream of a machine that has ended")
    handle = stream.ptr if isinstance(stream, _BaseStream) else int(stream)
    if handle in (NULL, LEGACY):
        handle = getDevice()
    elif handle == PER_THREAD:
        return _per_thread(machine, getDevice())
    elif handle < machine.num_gpus or handle not in machine.queues:
        machine.fail(f"there is no stream {handle:#x}")
    elif handle in machine.destroyed:
        machine.fail(f"the stream {handle:#x} was destroyed")
    return machine.queues[handle]


def _per_thread(machine: Machine, gpu: int) -> Queue:
    """This thread's default stream on a GPU, which is blocking: the null stream waits for it."""
    key = machine, gpu
    if key not in _local.per_thread:
        name = f"default of {threading.current_thread().name}:{gpu}"
        _local.per_thread[key] = machine.add_queue(gpu, name, blocking=True)
    return _local.per_thread[key]
