"""Captures recorded commands as a CUDA graph.

The streams that record are made for it: CUDA puts whatever any thread gives to a recording stream
into the graph, and lets nothing wait for it meanwhile. The devices' own streams stay usable.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.device import CommandList
from gradreduce.device.command_list import Command
from gradreduce.errors import CaptureError

from .streams import Gpu, StreamState


class _Recording(threading.local):
    """The streams that record what this thread submits.

    Attributes:
        streams: of each queue that records; None: this thread captures nothing.
    """

    streams: Mapping[StreamState, Any] | None = None

    def stream_of(self, state: StreamState) -> Any:
        """Returns the stream that takes the work of a queue."""
        return state.stream if self.streams is None else self.streams.get(state, state.stream)


recording = _Recording()


def captured_graph(command_list: CommandList, states: Mapping[StreamState, Gpu]) -> Command:
    """Captures commands as a graph; returns a command that launches it.

    In CUDA's thread-local mode: what other threads do, allocations too, is their own affair.

    Args:
        command_list: of which nothing is run now.
        states: all queues that the commands use, each with what makes its GPU current; the one
            that the graph is launched to first.

    Raises:
        CaptureError: CUDA cannot make a graph of it.
    """
    streams = {}
    for state, gpu in states.items():
        with gpu:
            streams[state] = cupy.cuda.Stream(non_blocking=True)
    (home, gpu), *others = states.items()
    origin = streams[home]
    try:
        with gpu:
            origin.begin_capture(runtime.streamCaptureModeThreadLocal)
        begun = gpu.event(origin)
        for state, other in others:
            with other:
                streams[state].wait_event(begun)
        recording.streams = streams
        try:
            command_list.run()
        finally:
            recording.streams = None
        graph = _ended(home, gpu, origin, [(streams[state], other) for state, other in others])
    except BaseException:
        with suppress(RuntimeError), gpu:
            origin.end_capture()
        raise

    def launch() -> None:
        home.submitted()
        with gpu:
            graph.launch(home.stream)
        home.submitted()

    return launch


def _ended(home: StreamState, gpu: Gpu, origin: Any, others: list[tuple[Any, Gpu]]) -> Any:
    """Ends the capture of ``origin``, behind the other streams; returns the graph."""
    try:
        for stream, other in others:
            ended = other.event(stream)
            with gpu:
                origin.wait_event(ended)
        with gpu:
            graph = origin.end_capture()
            graph.upload(home.stream)
        home.submitted()
    except runtime.CUDARuntimeError as error:
        raise CaptureError(f"CUDA cannot make a graph of the captured work: {error}") from error
    return graph
