"""Captures recorded commands as a CUDA graph.

A capture records on new streams. CUDA puts the work of all threads on a recording stream into the
graph, and nothing may wait for such a stream. The devices' own streams stay usable.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import cupy
from cupy.cuda import runtime

from gradreduce.device import Command, CommandList, DeviceQueue
from gradreduce.errors import CaptureError

from .streams import GpuScope


class _Recording(threading.local):
    """The streams that record what this thread submits.

    Attributes:
        streams: the recording stream of each queue; None if this thread does not capture.
    """

    streams: Mapping[DeviceQueue, Any] | None = None


recording = _Recording()


def capture_graph(
    command_list: CommandList, queues: Mapping[DeviceQueue, GpuScope], home: Any
) -> Command:
    """Captures commands as a graph; returns a command that launches it.

    Uses CUDA's thread-local mode: calls of other threads, such as allocations, stay allowed.

    Args:
        command_list: the commands; nothing is run now.
        queues: all queues that the commands use, each with the Gpu that makes its GPU current.
        home: the stream of the first queue, on which the graph is launched.

    Raises:
        CaptureError: CUDA cannot make a graph of the commands.
    """
    streams = {}
    for queue, gpu in queues.items():
        with gpu:
            streams[queue] = cupy.cuda.Stream(non_blocking=True)
    (first, gpu), *others = queues.items()
    origin = streams[first]
    try:
        with gpu:
            origin.begin_capture(runtime.streamCaptureModeThreadLocal)
        begun = gpu.event(origin)
        for queue, other in others:
            with other:
                streams[queue].wait_event(begun)
        recording.streams = streams
        try:
            command_list.run()
        finally:
            recording.streams = None
        graph = _end_capture(
            home, gpu, origin, [(streams[queue], other) for queue, other in others]
        )
    except BaseException:
        with suppress(RuntimeError), gpu:
            origin.end_capture()
        raise

    def launch() -> None:
        with gpu:
            graph.launch(home)

    return launch


def _end_capture(home: Any, gpu: GpuScope, origin: Any, others: list[tuple[Any, GpuScope]]) -> Any:
    """Joins the other streams into ``origin`` and ends its capture; returns the graph."""
    try:
        for stream, other in others:
            ended = other.event(stream)
            with gpu:
                origin.wait_event(ended)
        with gpu:
            graph = origin.end_capture()
            graph.upload(home)
    except runtime.CUDARuntimeError as error:
        raise CaptureError(f"CUDA cannot make a graph of the captured work: {error}") from error
    return graph
