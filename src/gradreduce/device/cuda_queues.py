"""The queues of a GPU device, and how they are ordered among each other; never moves a byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from .base import Device
from .cuda_capture import GraphRecording
from .cuda_gpu import Gpu
from .cuda_line import Line, event_of, is_capturing
from .fabric import Fabric
from .memory import LEGACY, PER_THREAD, Mark, Queue, Stream, User, handle_of

__all__ = ["CudaQueues"]


class CudaQueues(Device):
    """What of a ``CudaDevice`` orders its work.

    Attributes:
        gpu: makes its GPU the current one.
    """

    def __init__(self, fabric: Fabric, index: int, physical: int) -> None:
        super().__init__(fabric, index, physical)
        self.gpu = Gpu(self)
        queues: tuple[Queue, ...] = ("compute", "transfer")
        self._lines = {queue: Line(self.gpu, fabric.order_lock) for queue in queues}
        self._streams = {queue: line.stream for queue, line in self._lines.items()}

    def stream(self, queue: Queue = "compute") -> Any:
        """The CuPy stream of a queue, for work that this device does not see.

        Take it before each piece of such work, which is behind what came before. From the first
        time on every fence of the queue is given to CUDA, also one that would change nothing.
        """
        return self._lines[queue].show() if self.fabric.capture is None else self._ready(queue)

    def _ready(self, queue: Queue) -> Any:
        """The stream that is given something now; inside a capture, that which records it."""
        capture = self.fabric.capture
        if capture is None:
            return self._lines[queue].ready()
        assert isinstance(capture.backend, GraphRecording)
        return capture.backend.stream(self.index, queue)

    def _given(self, queue: Queue) -> None:
        """Something was given to a queue: ``_ready`` came before it."""
        self._lines[queue].given()

    def _is_capturing(self, stream: Stream) -> bool:
        return is_capturing(self.gpu, stream)

    def _mark(self, queue: User) -> Any:
        if not isinstance(queue, str):
            # In every thread this handle names that thread's own default stream. The legacy
            # default stream waits for all of them.
            stream = LEGACY if handle_of(queue) == PER_THREAD else queue
            return None if self._is_capturing(stream) else self._event(stream)
        ours = cast("Queue", queue)
        if self.fabric.capture is None:
            return self._lines[ours].mark()
        return self._event(self._ready(ours))

    def _wait(self, mark: Mark, queue: Queue) -> None:
        if self.fabric.capture is None:
            assert isinstance(mark.device, CudaQueues)
            self._lines[queue].wait(mark.device._lines[mark.queue], mark.event)
            return
        with self.gpu:
            self._ready(queue).wait_event(mark.event)

    def _recording(self, devices: Sequence[Device]) -> GraphRecording:
        places = [(each.index, each.gpu) for each in devices if isinstance(each, CudaQueues)]
        return GraphRecording(places, self._lines["compute"])

    def _led(self, others: Iterable[Device]) -> list[Device]:
        if self.fabric.capture is not None:
            return super()._led(others)
        line, physical = self._lines["compute"], self.physical
        waiting: list[Device] = []
        with self.fabric.order_lock:  # nobody is on the way behind an end that was earlier
            for other in others:
                assert isinstance(other, CudaQueues)
                behind = other._lines["compute"]
                if behind.leader is line or behind is line:
                    continue
                if other.physical != physical or not behind.trail(line):
                    waiting.append(other)
        return waiting

    def _unjoined(self, others: Iterable[Device]) -> list[Device]:
        if self.fabric.capture is not None:
            return super()._unjoined(others)
        line = self._lines["compute"]
        found: list[Device] = []
        for other in others:
            assert isinstance(other, CudaQueues)
            behind = other._lines["compute"]
            if behind is not line and not behind.trails(line):
                found.append(other)
        return found

    def _comes_behind(self, device: Device, queue: Queue) -> bool:
        assert isinstance(device, CudaQueues)
        near = device.physical == self.physical  # and lost with it, if ever
        return near and self._lines["compute"].comes_behind(device._lines[queue])

    def _event(self, stream: Stream) -> Any:
        return event_of(self.gpu, stream)

    def _all_streams(self) -> list[Any]:
        """Its own, and that of whom it trails: which may use its memory."""
        leader = self._lines["compute"].leader
        return [*self._streams.values(), *([] if leader is None else [leader.stream])]

    @property
    def _is_led(self) -> bool:
        return self._lines["compute"].leader is not None

    def _catch_up(self) -> None:
        self._lines["compute"].ready()
