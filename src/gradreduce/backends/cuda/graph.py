"""Captures the queues of some devices as a CUDA graph.

The streams that record are made for it: CUDA puts whatever any thread gives to a recording stream
into the graph, and lets nothing wait for it meanwhile. The devices' own streams stay usable.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.device import Queue
from gradreduce.device.command_list import Command
from gradreduce.device.graph_capture import Recording
from gradreduce.device.op_log import QUEUES
from gradreduce.errors import CaptureError

from .streams import Gpu, StreamState


class GraphRecording(Recording):
    """Records the queues of devices on one or more GPUs into one graph.

    Args:
        devices: a number for each device, and what makes its GPU current, the first one first.
        home: the queue that a launch is given to, of the first device.
    """

    def __init__(self, devices: Iterable[tuple[int, Gpu]], home: StreamState) -> None:
        self._home = home
        self._streams: dict[tuple[int, Queue], tuple[Gpu, Any]] = {}
        for index, gpu in devices:
            with gpu:
                for queue in QUEUES:
                    stream = cupy.cuda.Stream(non_blocking=True)
                    self._streams[index, queue] = (gpu, stream)
        (self._gpu, self._origin), *self._others = self._streams.values()

    def stream(self, index: int, queue: Queue) -> Any:
        """Returns the stream that records the queue of a device."""
        return self._streams[index, queue][1]

    def begin(self) -> None:
        """See ``Recording.begin``.

        In CUDA's thread-local mode: what other threads do, allocations too, is their own affair.
        """
        with self._gpu:
            self._origin.begin_capture(runtime.streamCaptureModeThreadLocal)
        begun = self._gpu.event(self._origin)
        for gpu, stream in self._others:
            with gpu:
                stream.wait_event(begun)

    def end(self) -> Command:
        """See ``Recording.end``.

        Raises:
            CaptureError: CUDA cannot make a graph of it.
        """
        try:
            for gpu, stream in self._others:
                ended = gpu.event(stream)
                with self._gpu:
                    self._origin.wait_event(ended)
            with self._gpu:
                graph = self._origin.end_capture()
                graph.upload(self._home.ready())
            self._home.submitted()
        except runtime.CUDARuntimeError as error:
            raise CaptureError(f"CUDA cannot make a graph of the captured work: {error}") from error
        self._streams.clear()  # a graph needs none of them
        self._others.clear()
        return partial(self._launch, graph)

    def abandon(self) -> None:
        """See ``Recording.abandon``."""
        with suppress(RuntimeError), self._gpu:
            self._origin.end_capture()

    def _launch(self, graph: Any) -> None:
        with self._gpu:
            graph.launch(self._home.ready())
        self._home.submitted()
