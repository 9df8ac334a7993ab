"""Captures the queues of some devices as a CUDA graph.

The streams that record are made for it: CUDA puts whatever any thread gives to a recording stream
into the graph, and lets nothing wait for it meanwhile. The devices' own streams stay usable.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.device import Queue
from gradreduce.device.command_list import Command, CommandList
from gradreduce.device.graph_capture import Recording
from gradreduce.device.op_log import QUEUES
from gradreduce.errors import CaptureError

from .streams import Gpu, StreamState


class GraphRecording(Recording):
    """Records the queues of devices on one or more GPUs into one graph.

    Args:
        gpus: of each number of a GPU what makes it current, the first device's first.
        home: the queue that a launch is given to, of the first device.

    Attributes:
        streams: those that record, by GPU and queue.
    """

    def __init__(self, gpus: Mapping[int, Gpu], home: StreamState) -> None:
        self._home = home
        self.streams: dict[tuple[int, Queue], Any] = {}
        for number, gpu in gpus.items():
            with gpu:
                for queue in QUEUES:
                    self.streams[number, queue] = cupy.cuda.Stream(non_blocking=True)
        found = [(gpus[number], stream) for (number, _), stream in self.streams.items()]
        (self._gpu, self._origin), *self._others = found

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

    def end(self, command_list: CommandList) -> Command:
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
                graph.upload(self._home.stream)
            self._home.submitted()
        except runtime.CUDARuntimeError as error:
            raise CaptureError(f"CUDA cannot make a graph of the captured work: {error}") from error
        self.streams.clear()  # a graph needs none of them
        self._others.clear()
        return partial(self._launch, graph)

    def abandon(self) -> None:
        """See ``Recording.abandon``."""
        with suppress(RuntimeError), self._gpu:
            self._origin.end_capture()

    def _launch(self, graph: Any) -> None:
        with self._gpu:
            graph.launch(self._home.stream)
        self._home.submitted()
