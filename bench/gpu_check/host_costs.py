"""Measures the host time of single driver calls through CuPy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import cupy
from measure.clock import Call, host_seconds
from measure.random_values import fill

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Buffer, Capture, CommandList, Device

backend: Any = importlib.import_module("gradreduce.backends.cuda.device")
SIZE = 1000  # elements: the GPU is done before the next call comes
CALLS, QUICK_CALLS = 200, 2


def launch_of(device: Device, buffers: Sequence[Buffer]) -> tuple[Any, Sequence[Any]]:
    """Returns CuPy's kernel of an ``add_n``, and its grid, block and arguments."""
    find, launched = backend.load_kernel, []

    def found(*words: Any) -> tuple[Any, int]:
        entry, resident = find(*words)

        def launch(*arguments: Any, **options: Any) -> None:
            launched.append((entry, arguments))
            entry(*arguments, **options)

        return launch, resident

    backend.load_kernel = found
    try:
        ops.add_n(buffers[:1], [buffers[1:]], device=device)
    finally:
        backend.load_kernel = find
    (only,) = launched
    return only


def calls_of(device: Any, buffers: Sequence[Buffer]) -> dict[str, Call]:
    """Returns launches, also in a graph, and the event calls of a mark and a wait."""
    stream, own = device._stream("compute"), cupy.cuda.Stream(non_blocking=True)
    entry, words = launch_of(device, buffers)
    own.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    entry(*words, stream=own)
    graph = own.end_capture()
    commands = CommandList()
    with device.mesh_state.recording_commands(commands):
        ops.add_n(buffers[:1], [buffers[1:]], device=device)
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return {
        "launch": partial(entry, *words, stream=stream),
        "graph launch": partial(graph.launch, stream),
        "graph launch, our call": Capture([device], commands).submit,
        "event, made and recorded": lambda: cupy.cuda.Event(disable_timing=True).record(stream),
        "event, recorded": partial(event.record, stream),
        "event, asked": lambda: event.done,
        "stream waits for an event": partial(stream.wait_event, event),
        "with Device": lambda: _entered(cupy.cuda.Device(device.physical)),
        "with our own Gpu": partial(_entered, device.gpu),
        "add_n of 3 Buffers, our call": partial(gr.add_n, buffers[1:]),
    }


def _entered(gpu: Any) -> None:
    with gpu:
        pass


def measured(quick: bool) -> dict[str, float]:
    """Returns the microseconds of each kind of call."""
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        buffers = [fill(device.empty((SIZE,), "float32")) for _ in range(4)]
        ops.add_n(buffers[:1], [buffers[1:]], device=device)  # compiled
        with device.gpu:  # type: ignore[attr-defined]  # a CudaDevice
            calls = calls_of(device, buffers)
            seconds = host_seconds(calls, QUICK_CALLS if quick else CALLS, quick=quick)
        device.mesh_state.order.add_work(device.compute)
        mesh.synchronize()
    return {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
