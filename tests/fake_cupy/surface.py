"""What our CUDA files use of ``cupy`` and ``cupy.cuda``, on the machine of the moment.

Objects remember their machine: one that is used after its machine has ended is a fault.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

from . import graphs
from .machine import Call, Machine, Queue, current

__all__ = [
    "CUDADriverError",
    "CUDARuntimeError",
    "Device",
    "Event",
    "ExternalStream",
    "Stream",
    "check_addresses",
    "eventQuery",
    "getDevice",
    "get_current_stream",
    "get_elapsed_time",
    "queue_of",
    "streamQuery",
    "stream_now",
]


class CUDARuntimeError(RuntimeError):
    """As CuPy's: the text begins with CUDA's own name of the error, ``status`` is its number.

    CuPy's takes the number alone, and finds the text by itself.
    """

    def __init__(self, text: str | int, status: int = 1) -> None:
        if isinstance(text, int):
            text, status = f"cudaError{text}: as the driver calls it", text
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    """As CuPy's, for what it asks the driver and not the runtime: launches, loading of modules."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: as the driver calls it")
        self.status = status


def check_addresses(*values):
    """CuPy's ``intptr_t`` parameters take Python integers, and none of NumPy's."""
    for value in values:
        if not isinstance(value, int):
            raise TypeError("an integer is required")


class _Local(threading.local):
    """What CUDA and CuPy keep for each host thread."""

    def __init__(self) -> None:
        self.gpu = 0
        self.devices: list[int] = []
        self.streams: dict[int, Any] = {}
        self.stack: list[tuple[int, Any]] = []


_local = _Local()


def forget() -> None:
    """A new machine has no current streams of the old one (in the thread that runs tests)."""
    _local.__init__()


def getDevice():
    return _local.gpu


def setDevice(device):
    if not 0 <= device < current().num_gpus:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    _local.gpu = device


class Device:
    """A GPU; ``with`` makes it the current one of the thread."""

    def __init__(self, device=None):
        self.id = getDevice() if device is None else int(device)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

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
            for queue in list(machine.queues.values()):
                if queue.gpu == self.id:
                    machine.finish(queue.last)

    @property
    def attributes(self):
        return {
            "MultiProcessorCount": 4,
            "MaxThreadsPerBlock": 1024,
            "MaxThreadsPerMultiProcessor": 2048,
            "WarpSize": 32,
        }


class _BaseStream:
    """A stream: what ``Stream`` and ``ExternalStream`` share."""

    ptr: int
    device_id: int
    _machine: Machine

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return hash(self.ptr)

    def __enter__(self):
        gpu = _local.gpu
        queue = queue_of(current(), self)
        if queue.gpu != gpu:
            current().fail(f"wrong device: {queue} of GPU {queue.gpu} made current on GPU {gpu}")
        _local.stack.append((gpu, _local.streams.get(gpu)))
        _local.streams[gpu] = self
        return self

    def __exit__(self, *exc):
        gpu, before = _local.stack.pop()
        _local.streams[gpu] = before

    def use(self):
        _local.streams[_local.gpu] = self
        return self

    @property
    def done(self):
        with self._machine.entered() as machine:
            last = queue_of(machine, self).last
            return last is None or machine.polled(last)

    def synchronize(self):
        with self._machine.entered() as machine:
            machine.count("synchronize")
            graphs.refuse_in_capture(machine, f"the host waits for {queue_of(machine, self)}")
            machine.finish(queue_of(machine, self).last)

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

    def is_capturing(self):
        with self._machine.entered() as machine:
            return queue_of(machine, self).capture is not None

    def wait_event(self, event):
        with self._machine.entered() as machine:
            if event._call is None:
                machine.fail(f"{queue_of(machine, self)} waits for an event never recorded")
            if event._machine is not machine:
                machine.fail("an event of a machine that has ended")
            machine.count("wait")
            machine.wait(queue_of(machine, self), event._call)

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event


class Stream(_BaseStream):
    """A stream of the current GPU. Blocking ones are refused: they wait for the null stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self._machine = current()
        self.device_id = getDevice()
        with self._machine.entered() as machine:
            if null:
                self.ptr = 0
            elif not non_blocking:
                machine.fail("a blocking stream waits for the null stream; say non_blocking=True")
            else:
                self.ptr = machine.add_queue(self.device_id, "stream").handle

    def __del__(self):
        # No lock while an object dies. What it holds still runs, but nobody may name it again.
        if getattr(self, "ptr", 0):
            self._machine.destroyed.add(self.ptr)


class ExternalStream(_BaseStream):
    """A stream that somebody else made, by its handle."""

    def __init__(self, ptr, device_id=-1):
        self._machine = current()
        self.ptr = ptr
        self.device_id = getDevice() if device_id < 0 else device_id


_handles = itertools.count(0x1000)
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
NOT_READY = 600


def eventQuery(event):
    """``runtime.eventQuery``: 0, cudaErrorNotReady, or what has become of the GPU; never raises."""
    check_addresses(event)
    found = _events[event]
    with found._machine.entered() as machine:
        if found._call is None:
            machine.fail("asked whether an event never recorded has passed")
        return _status(machine, found._call)


def streamQuery(stream):
    """``runtime.streamQuery``: as ``eventQuery``, for all that the stream holds."""
    check_addresses(stream)
    with current().entered() as machine:
        queue = queue_of(machine, stream)
        return _status(machine, queue.last) if queue.last is not None else 0


def _status(machine: Machine, call: Call) -> int:
    if call.queue.gpu in machine.dead:
        return machine.dead[call.queue.gpu].status
    return 0 if machine.polled(call, waits=True) else NOT_READY


class Event:
    """A place in a stream, once recorded. It belongs to the GPU that was current when made."""

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
            return machine.polled(self._call)

    def synchronize(self):
        with self._machine.entered() as machine:
            if self._call is None:
                machine.fail("waited for an event never recorded")
            machine.finish(self._call)


def get_elapsed_time(start_event, end_event):
    """Milliseconds from one event to another; what the host took to run the fake's work."""
    with current().entered() as machine:
        for event in (start_event, end_event):
            if event._call is None or not event._call.passed:
                machine.fail("the time of an event that has not passed")
            if not event._timed:
                machine.fail("the time of an event made with disable_timing=True")
    return (end_event._reached - start_event._reached) * 1e3


def get_current_stream(device_id=-1):
    gpu = getDevice() if device_id < 0 else device_id
    found = _local.streams.get(gpu)
    if found is None:
        found = ExternalStream(0, gpu)
    return found


def stream_now() -> Any:
    """The current stream of the current GPU."""
    return get_current_stream(-1)


def queue_of(machine: Machine, stream: Any) -> Queue:
    """The queue of a CuPy stream, a raw handle, or (None) of the current stream.

    The handle 0 is the null stream of the stream's GPU, or of the current one; so is 1, which
    CUDA calls the legacy one.
    """
    if stream is None:
        stream = stream_now()
    if isinstance(stream, _BaseStream):
        if stream._machine is not machine:
            machine.fail("a stream of a machine that has ended")
        handle, gpu = stream.ptr, stream.device_id
    else:
        handle, gpu = int(stream), getDevice()
    if handle in (0, 1):
        handle = gpu
    elif handle < machine.num_gpus or handle not in machine.queues:
        machine.fail(f"there is no stream {handle:#x}")
    elif handle in machine.destroyed:
        machine.fail(f"the stream {handle:#x} was destroyed")
    return machine.queues[handle]
