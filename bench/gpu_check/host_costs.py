"""Measures the host time of single driver calls through CuPy.

A kernel's table is converted once to an argument of CuPy. CuPy also accepts the NumPy struct, and
then converts it at each launch. Both are measured.
"""

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


def launches(device: Any, buffers: Sequence[Buffer]) -> dict[str, Call]:
    """Returns a launch with its table as struct, as an argument made before, and in a graph."""
    entry, (grid, block, arguments) = launch_of(device, buffers)
    struct = next(reversed(device._tables._made.values())).struct  # of this launch
    stream = device._stream("compute")
    forms = (struct, *arguments[1:])
    calls: dict[str, Call] = {
        "launch": partial(entry, grid, block, arguments, stream=stream),
        "launch, struct argument": partial(entry, grid, block, forms, stream=stream),
        "making of an argument": lambda: backend.Argument(struct),
    }
    own = cupy.cuda.Stream(non_blocking=True)
    own.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    entry(grid, block, arguments, stream=own)
    calls["graph launch"] = partial(own.end_capture().launch, stream)
    return calls


def graph_of(device: Device, buffers: Sequence[Buffer]) -> Capture:
    """Captures one ``add_n`` as a graph."""
    commands = CommandList()
    with device.mesh_state.recording_commands(commands):
        ops.add_n(buffers[:1], [buffers[1:]], device=device)
    return Capture([device], commands)


def events(device: Any) -> dict[str, Call]:
    """Returns the event calls of a mark and a wait."""
    stream = device._stream("compute")
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)

    def fresh() -> None:
        cupy.cuda.Event(disable_timing=True).record(stream)

    def current() -> None:
        with cupy.cuda.Device(device.physical):
            pass

    return {
        "event, made and recorded": fresh,
        "event, recorded": partial(event.record, stream),
        "event, asked": lambda: event.done,
        "stream waits for an event": partial(stream.wait_event, event),
        "with Device": current,
        "with our own Gpu": partial(_entered, device.gpu),
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
        graph = graph_of(device, buffers)
        with cupy.cuda.Device(mesh.devices[0].physical):
            calls: dict[str, Call] = {
                **launches(device, buffers),
                "graph launch, our call": graph.submit,
                **events(device),
                "add_n of 3 Buffers, our call": partial(gr.add_n, buffers[1:]),
            }
            number = QUICK_CALLS if quick else CALLS
            seconds = host_seconds(calls, number, quick=quick)
        device.mesh_state.order.add_work(device.compute)
        mesh.synchronize()
    return {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
