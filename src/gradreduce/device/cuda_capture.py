"""A CUDA graph of what the queues of some devices are given; never knows what that is.

The streams that record are made for it: CUDA puts whatever any thread gives to a recording stream
into the graph, and lets nothing wait for it meanwhile. The devices' own streams stay usable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.errors import CaptureError

from .capture import Recording
from .memory import Queue
from .tape import Issue

__all__ = ["GraphRecording", "Trail"]


class GraphRecording(Recording):
    """Records the queues of several devices, on one or several GPUs, into one graph.

    Args:
        places: a number for each device, and what makes its GPU current, the first one first.
        home: tells the stream that a launch is given to, on the first device's GPU.
    """

    def __init__(self, places: Iterable[tuple[int, Any]], home: Callable[[], Any]) -> None:
        self._home = home
        self._streams: dict[tuple[int, Queue], tuple[Any, Any]] = {}
        for index, gpu in places:
            with gpu:
                for queue in ("compute", "transfer"):
                    stream = cupy.cuda.Stream(non_blocking=True)
                    self._streams[index, queue] = (gpu, stream)
        (self._gpu, self._origin), *self._others = self._streams.values()

    def stream(self, index: int, queue: Queue) -> Any:
        """That records the queue of a device."""
        return self._streams[index, queue][1]

    def begin(self) -> None:
        """See ``Recording.begin``.

        In CUDA's thread-local mode: what other threads do, allocations too, is their own affair.
        """
        with self._gpu:
            self._origin.begin_capture(runtime.streamCaptureModeThreadLocal)
        begun = _event(self._gpu, self._origin)
        for gpu, stream in self._others:
            with gpu:
                stream.wait_event(begun)

    def end(self) -> Issue:
        """See ``Recording.end``.

        Raises:
            CaptureError: CUDA cannot make a graph of it.
        """
        try:
            for gpu, stream in self._others:
                ended = _event(gpu, stream)
                with self._gpu:
                    self._origin.wait_event(ended)
            with self._gpu:
                graph = self._origin.end_capture()
                graph.upload(self._home())
        except runtime.CUDARuntimeError as error:
            raise CaptureError(f"CUDA makes no graph of what was captured: {error}") from error
        self._streams.clear()  # a graph needs none of them
        self._others.clear()
        return partial(self._launch, graph)

    def abandon(self) -> None:
        """See ``Recording.abandon``."""
        with suppress(runtime.CUDARuntimeError, RuntimeError), self._gpu:
            self._origin.end_capture()

    def _launch(self, graph: Any) -> None:
        with self._gpu:
            graph.launch(self._home())


class Trail:
    """Whom a compute queue has yet to wait for, before it is given anything.

    Attributes:
        leader: a device of the same GPU; None where the queue waits for it already.
    """

    def __init__(self) -> None:
        self.leader: Any = None
        self._lock = threading.Lock()

    def by(self, leader: Any) -> None:
        """What the queue is given from now on comes behind what the leader's holds."""
        with self._lock:
            self.leader = leader

    def catch_up(self, gpu: Any, stream: Any) -> None:
        """The queue waits for the leader's, whose end may be a later one by now."""
        with self._lock:  # who finds no leader any more finds the wait in the queue
            if self.leader is not None:
                event = self.leader._mark("compute")
                with gpu:
                    stream.wait_event(event)
                self.leader = None


def _event(gpu: Any, stream: Any) -> Any:
    with gpu:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
    return event
