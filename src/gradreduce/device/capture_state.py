"""Whether a thread is inside a capture, and what that changes for the devices; never keeps work."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradreduce.errors import CaptureError

from .buffer import CapturedMark, Mark, Queue, Stream
from .graph_capture import Capture
from .op_log import FlightRecorder, Recorder, Sink

if TYPE_CHECKING:
    from .device import Device
    from .kernel import Kernel, Template

__all__ = ["CaptureState"]


class _Mine(threading.local):
    """The capture that a thread is in, of whichever mesh."""

    capture: Capture | None = None


_mine = _Mine()


class CaptureState(ABC):
    """The part of a ``Fabric`` that the rules of captures go through."""

    flight_recorder: FlightRecorder
    recorder: Recorder

    def __init__(self) -> None:
        self._mine = _mine
        self.check_outside("opening a mesh")

    @property
    def capture(self) -> Capture | None:
        """What keeps this thread's work instead of the queues; None: they do it."""
        return self._mine.capture

    @property
    def sink(self) -> Sink:
        """Where this thread's records go: what is captured has not been done."""
        return self._mine.capture or self.recorder

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """Inside, this thread's work is kept by ``capture``."""
        self._mine.capture = capture
        try:
            yield
        finally:
            self._mine.capture = None

    def entering(self, device: Device, stream: Stream | None) -> Stream | None:
        """The caller's stream that a queue waits for now; inside a capture each call will."""
        capture = self._mine.capture
        if capture is None or stream is None:
            return stream
        capture.enters(device, stream)
        return None

    def new_mark(self, device: Device, queue: Queue, event: Any) -> Mark:
        """A mark; inside a capture one that says nothing outside."""
        capture = self._mine.capture
        if capture is None:
            self.flight_recorder.marked(device, queue, event)
            return Mark(device, queue, event)
        mark = CapturedMark(device, queue, event)
        capture.made(mark)
        return mark

    def is_waited_for(self, mark: Mark) -> bool:
        """Whether a wait for ``mark`` is given to a queue now.

        Raises:
            CaptureError: it was made inside a capture, and this is outside.
        """
        capture = self._mine.capture
        if capture is not None:
            return capture.waits_for(mark)
        if type(mark) is CapturedMark:
            raise CaptureError(
                f"a mark made inside a capture of {mark.device.name} cannot be waited for outside: "
                "make another mark outside"
            )
        return True

    def check_free(self, device: Device, what: str) -> None:
        """As ``check_usable``; and raises ``CaptureError`` inside a capture."""
        self.check_usable(device)
        self.check_outside(what)

    def check_outside(self, what: str) -> None:
        """Raises ``CaptureError`` inside a capture of any mesh."""
        if self._mine.capture is not None:
            raise CaptureError(
                f"{what} is not allowed inside a capture, which records only launches, copies, "
                "marks and waits: do it before the capture"
            )

    def check_compiled(self, device: Device, kernel: Kernel, template: Template) -> None:
        """Raises ``CaptureError`` inside a capture for a kernel that must be compiled."""
        if self._mine.capture is not None and not device._is_prepared(kernel, template):
            self.check_free(device, f"compiling {kernel.name}")

    @abstractmethod
    def check_usable(self, device: Device) -> None:
        """See ``Fabric.check_usable``."""
