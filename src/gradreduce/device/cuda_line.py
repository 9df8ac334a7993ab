"""One queue of a GPU device: its stream, and which fences of it would change nothing.

To mark a stream and to wait for the mark cost the host a microsecond each; devices that share a
GPU have many of both. So a queue is marked once however often it is asked for its end, nobody
waits for the same mark twice, and who works for others on one GPU is waited for late, if at all.
Never decides what is ordered: what is left out here is what the queues know already.
"""

from __future__ import annotations

import threading
from typing import Any

import cupy
from cupy.cuda import runtime

from .memory import Stream, handle_of

__all__ = ["Line", "event_of", "is_capturing"]

# CUDA's error of a default stream on whose GPU a blocking stream is capturing.
_CAPTURE_IMPLICIT = 906


class Line:
    """One queue.

    Whoever gives it something takes ``ready()`` for it, and says ``given()`` afterwards: another
    thread that asks for its end in between must not be told later that this was its end.

    Args:
        gpu: makes its GPU the current one.
        lock: of the whole mesh, re-entrant: held while somebody comes behind a leader.

    Attributes:
        stream: CuPy's.
        leader: the queue on the same GPU behind which comes whatever this one is given from now
            on; None where it has been told so already.
        shown: whether the stream was handed out. What it holds is not known here from then on:
            nothing is left out.
    """

    __slots__ = ("_behind", "_end", "_gpu", "_lock", "_marked", "leader", "shown", "stream")

    def __init__(self, gpu: Any, lock: threading.RLock) -> None:
        self._gpu = gpu
        with gpu:
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self.leader: Line | None = None
        self.shown = False
        self._lock = lock
        self._end = object()  # another one after whatever was given
        self._marked: tuple[object, Any] = (None, None)  # an end, and the event there
        self._behind: dict[Line, Any] = {}  # of others the last event that it was told to wait for

    def ready(self) -> Any:
        """The stream, behind all that it has to be behind."""
        if self.leader is not None:
            self._catch_up()
        return self.stream

    def given(self) -> None:
        """Something was given to the stream; marks from before are its end no more."""
        self._end = object()

    def show(self) -> Any:
        """As ``ready``, for somebody whose work is not seen here."""
        self.shown = True
        return self.ready()

    def mark(self) -> Any:
        """An event at the end of what it holds."""
        stream = self.ready()
        end = self._end  # before the event: what is given meanwhile makes it another one
        last, event = self._marked
        if last is not end or self.shown:
            event = event_of(self._gpu, stream)
            self._marked = (end, event)
        return event

    def wait(self, other: Line, event: Any) -> None:
        """What it is given from now on comes behind an event of another queue."""
        if self._behind.get(other) is event:
            return
        stream = self.ready()
        with self._gpu:
            stream.wait_event(event)
        self._behind[other] = event
        self.given()

    def trail(self, leader: Line) -> bool:
        """Whether it comes behind what the leader's holds, by the time it is given anything.

        Which may be more than the leader's holds now: on one GPU that costs little, and as a rule
        nothing is given to who trails. False: it must wait at once.
        """
        if self.shown:
            return False
        with self._lock:  # nobody is on the way behind an end of the leader's that was earlier
            if self.leader is not leader:
                leader.ready()  # nobody trails who trails it
                self.ready()
                self.leader = leader
        return True

    def trails(self, leader: Line) -> bool:
        """Whether it trails, and the leader comes behind all that it holds: no fence is missing."""
        if self.leader is not leader:
            return False
        end, event = self._marked
        return end is self._end and leader._behind.get(self) is event

    def comes_behind(self, other: Line) -> bool:
        """Whether what it is given from now on comes behind all that the other holds now."""
        with self._lock:
            return not other.shown and (self.leader is other or other._is_over_for(self))

    def _is_over_for(self, other: Line) -> bool:
        end, event = self._marked
        return end is self._end and not self.shown and other._behind.get(self) is event

    def _catch_up(self) -> None:
        with self._lock:  # who finds no leader any more finds the wait in the queue
            leader = self.leader
            if leader is None:
                return
            event = leader.mark()
            if self._behind.get(leader) is not event:
                with self._gpu:
                    self.stream.wait_event(event)
                self._behind[leader] = event
                self.given()
            self.leader = None


def event_of(gpu: Any, stream: Stream) -> Any:
    """An event at the end of what a stream of this GPU holds."""
    with gpu:  # which the event belongs to, and whose default stream a handle may name
        event = cupy.cuda.Event(disable_timing=True)
        runtime.eventRecord(event.ptr, handle_of(stream))
    return event


def is_capturing(gpu: Any, stream: Stream) -> bool:
    """Whether a stream of this GPU records a CUDA graph, or must wait for one that does."""
    with gpu:  # whose default stream a handle may name
        try:
            return bool(runtime.streamIsCapturing(handle_of(stream)))
        except RuntimeError as error:  # without a status: its capture is invalid
            if getattr(error, "status", _CAPTURE_IMPLICIT) != _CAPTURE_IMPLICIT:
                raise
            return True
