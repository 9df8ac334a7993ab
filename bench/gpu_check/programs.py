"""Short programs of ``first``; each returns its figures."""

import importlib
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from measure.clock import Call, GpuClock, host_seconds
from measure.operands import fill

import gradreduce as gr
from gradreduce import ops
from gradreduce.cli.system_info import find_system_info
from gradreduce.device import Capture, CommandList
from gradreduce.errors import BackendUnavailableError

from .setting import find_tool

TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "g++", "nvcc")
MOST_PROCESSES = 16  # each has a context on the GPU, of half a gigabyte
QUICK_TEMPLATES = 3
NBYTES, QUICK_NBYTES = 2**30, 2**16  # far more than any cache holds
SMALL_SIZE = 1000  # elements: the GPU is done before the next call comes
CALLS, QUICK_CALLS = 200, 2


def versions(quick: bool) -> dict[str, Any]:
    """Lists libraries, GPUs with their peers, and tools."""
    return {**asdict(find_system_info()), "tools": {name: find_tool(name) for name in TOOLS}}


def add(quick: bool) -> dict[str, int]:
    """Uploads two arrays to the GPU, adds them, and compares with NumPy's sum."""
    array = np.arange(1000, dtype=np.float32)
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        total = gr.add_n([device.put(array), device.put(array)]).numpy()
    np.testing.assert_array_equal(total, 2 * array)
    return {"compared": total.size}


def compile_kernels(quick: bool) -> dict[str, float]:
    """Compiles every kernel on all cores, so that later checks find them in the cache on disk.

    One after another they take a minute or more, in which no check would have come further.
    """
    start, processes = time.perf_counter(), min(MOST_PROCESSES, os.cpu_count() or 1)
    if quick:  # on the fake GPU, which other processes do not have
        processes, compiled = 1, compile_some(1, QUICK_TEMPLATES, 0)
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            compiled = sum(pool.map(partial(compile_some, processes, None), range(processes)))
    seconds = time.perf_counter() - start
    return {"templates": compiled, "processes": processes, "seconds": seconds}


def compile_some(step: int, most: int | None, first: int) -> int:
    """Compiles every ``step``-th template from the ``first``; returns how many."""
    templates = [(kernel, each) for kernel in ops.KERNELS for each in kernel.templates]
    chosen = templates[first::step][:most]
    with gr.open_mesh(1, backend="cuda") as mesh:
        for kernel, template in chosen:
            mesh.devices[0].compile_kernel(kernel, template)
    return len(chosen)


def copy_rate(quick: bool) -> dict[str, float]:
    """Measures copies within GPU memory, the baseline of other figures: bytes read and written."""
    nbytes = QUICK_NBYTES if quick else NBYTES
    with gr.open_mesh(1, backend="cuda") as mesh:
        took = GpuClock(mesh.devices[0], quick=quick).measure({}, 2 * nbytes)["copy"]
    return {"nbytes": nbytes, "median_gigabytes_per_second": 2 * nbytes / took.seconds / 1e9}


def host_costs(quick: bool) -> dict[str, float]:
    """Measures the microseconds of the host for single driver calls through CuPy, and for ours."""
    import cupy

    with gr.open_mesh(1, backend="cuda") as mesh:
        device: Any = mesh.devices[0]
        stream, event = device._stream("compute"), cupy.cuda.Event(disable_timing=True)
        buffers = [fill(device.empty((SMALL_SIZE,), "float32")) for _ in range(4)]
        launch = partial(ops.add_n, buffers[:1], [buffers[1:]], device=device)
        launch()  # compiled
        commands = CommandList()
        with device.mesh_state.recording_commands(commands):
            launch()

        def entered(gpu: Any) -> None:
            with gpu:
                pass

        calls: dict[str, Call] = {
            "launch": launch,
            "graph launch": Capture([device], commands).submit,
            "event, made and recorded": lambda: cupy.cuda.Event(disable_timing=True).record(stream),
            "event, recorded": partial(event.record, stream),
            "event, asked": lambda: event.done,
            "stream waits for an event": partial(stream.wait_event, event),
            "with Device": lambda: entered(cupy.cuda.Device(device.physical)),
            "with our own Gpu": partial(entered, device.gpu),
            "add_n of 3 Buffers": partial(gr.add_n, buffers[1:]),
        }
        with device.gpu:
            event.record(stream)
            seconds = host_seconds(calls, QUICK_CALLS if quick else CALLS, quick=quick)
        device.mesh_state.order.add_work(device.compute)
        mesh.synchronize()
    return {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}


def assertion(quick: bool) -> dict[str, list[str]]:
    """Returns our errors after a failed assertion in a PyTorch kernel, here an index out of bounds.

    It makes the CUDA context of this process unusable (error 710, ``cudaErrorAssert``) for every
    library.
    """
    return {"said": said_after(fail_assertion)}


def fail_assertion() -> None:
    """Launches a PyTorch kernel with a failing assertion, and waits until it has failed."""
    torch = importlib.import_module("torch")
    index = torch.tensor([SMALL_SIZE], device="cuda")
    torch.ones(1, device="cuda")[index]
    with suppress(RuntimeError):
        torch.cuda.synchronize()


def said_after(fail: Call) -> list[str]:
    """Returns the errors of our later calls on two logical devices of the GPU."""
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        buffers = [device.upload(np.ones(SMALL_SIZE, np.float32)) for device in mesh]
        mesh.synchronize()
        fail()
        calls: list[Call] = [device.synchronize for device in mesh]
        calls += [*(buffer.numpy for buffer in buffers), partial(gr.add_n, buffers)]
        return [failure_of(call) for call in calls]


def failure_of(call: Call) -> str:
    try:
        call()
    except BackendUnavailableError as error:
        return str(error)
    raise AssertionError("a call on a failed device raised nothing")
