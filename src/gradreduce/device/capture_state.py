"""Whether a thread is inside a capture, and how that changes device calls."""

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


class _Current(threading.local):
    """The capture that the current thread is in, of any mesh."""

    capture: Capture | None = None


_current = _Current()


class CaptureState(ABC):
    """The part of ``MeshState`` that implements the rules of captures.

    Attributes:
        current: its ``capture`` is what the property gives, without a Python call.
    """

    flight_recorder: FlightRecorder
    recorder: Recorder

    def __init__(self) -> None:
        self.current = _current
        self.check_outside("opening a mesh")

    @property
    def capture(self) -> Capture | None:
        """The capture that records this thread's work; None outside of one."""
        return self.current.capture

    @property
    def sink(self) -> Sink:
        """Receives this thread's records: the open capture, else the journals."""
        return self.current.capture or self.recorder

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """Context manager: ``capture`` records this thread's work."""
        self.current.capture = capture
        try:
            yield
        finally:
            self.current.capture = None

    def entering(self, device: Device, stream: Stream | None) -> Stream | None:
        """Returns the stream to wait for now; None in a capture, which waits per call."""
        capture = self.current.capture
        if capture is None or stream is None:
            return stream
        capture.enters(device, stream)
        return None

    def new_mark(self, device: Device, queue: Queue, event: Any) -> Mark:
        """Makes a mark; one made inside a capture has no meaning outside."""
        capture = self.current.capture
        if capture is None:
            self.flight_recorder.marked(device, queue, event)
            return Mark(device, queue, event)
        mark = CapturedMark(device, queue, event)
        capture.made(mark)
        return mark

    def is_waited_for(self, mark: Mark) -> bool:
        """Whether a queue has to wait for ``mark`` now.

        Raises:
            CaptureError: it was made inside a capture, and this is outside.
        """
        capture = self.current.capture
        if capture is not None:
            return capture.waits_for(mark)
        if type(mark) is CapturedMark:
            raise CaptureError(
                f"a mark made inside a capture of {mark.device.name} cannot be waited for outside: "
                "make another mark outside"
            )
        return True

    def check_free(self, device: Device, what: str) -> None:
        """Raises as ``check_usable`` does, and ``CaptureError`` inside a capture."""
        self.check_usable(device)
        self.check_outside(what)

    def check_outside(self, what: str) -> None:
        """Raises ``CaptureError`` inside a capture of any mesh."""
        if self.current.capture is not None:
            raise CaptureError(
                f"{what} is not allowed inside a capture, which records only launches, copies, "
                "marks and waits: do it before the capture"
            )

    def check_compiled(self, device: Device, kernel: Kernel, template: Template) -> None:
        """Raises ``CaptureError`` inside a capture for a kernel that must be compiled."""
        if self.current.capture is None:
            return
        if not device._prepare(kernel, template, may_compile=False):
            self.check_free(device, f"compiling {kernel.name}")

    @abstractmethod
    def check_usable(self, device: Device) -> None:
        """See ``MeshState.check_usable``."""
