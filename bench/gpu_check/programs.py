"""Short programs of ``first``; each returns its figures."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Capture, CommandList

from .setting import find_tool

# Words in the names of packages that matter here.
WORDS = ("cuda", "cupy", "gradreduce", "hypothesis", "jax", "ml-dtypes", "nccl", "numpy", "nvidia",
         "pytest", "torch", "triton")  # fmt: skip
TOOLS = ("nvidia-smi", "compute-sanitizer", "g++", "nvcc")
SMI_SECONDS = 30.0
MOST_PROCESSES = 16  # each has a context on the GPU, of half a gigabyte
QUICK_TEMPLATES = 3
NBYTES, QUICK_NBYTES = 2**30, 2**16  # far more than any cache holds
COPIES = 40  # of one round, some 0.02 s on a GPU of 4 TB/s
ROUNDS = 5
SMALL_SIZE = 1000  # elements: the GPU is done before the next call comes
CALLS, QUICK_CALLS = 200, 2


def versions(quick: bool) -> dict[str, Any]:
    """Lists installed libraries and tools, and the links between the GPUs."""
    named = {one.metadata["Name"] or "": one.version for one in metadata.distributions()}
    chosen = {name for name in named if any(word in name.lower() for word in WORDS)}
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: named[name] for name in sorted(chosen, key=str.lower)},
        "tools": {name: find_tool(name) for name in TOOLS},
        "reduction_groups": links(),
    }


def links() -> str:
    """Returns the topology that ``nvidia-smi`` prints, or the reason if it fails."""
    tool = find_tool("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not installed"
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True,
                              timeout=SMI_SECONDS, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"nvidia-smi has not answered in {SMI_SECONDS:g} s"
    return done.stdout or done.stderr


def add(quick: bool) -> dict[str, int]:
    """Uploads two arrays to the GPU, adds them, and compares with NumPy's sum."""
    array = np.arange(1000, dtype=np.float32)
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        total = gr.add_n([device.put(array), device.put(array)]).numpy()
    if not np.array_equal(total, 2 * array):
        raise AssertionError(f"{total[:8]} is not {2 * array[:8]}")
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
    """Measures copies within GPU memory, the baseline of other figures: bytes read and written.

    All copies are queued before the first has ended, so that the host does not limit the rate.
    """
    import cupy
    from cupy.cuda import runtime
    from measure.random_values import fill

    nbytes, rates = QUICK_NBYTES if quick else NBYTES, []
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        shape = (nbytes // 4,)
        source, target = (fill(device.empty(shape, "float32"), seed) for seed in range(2))
        mesh.synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        ends = target.address, source.address
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            for _ in range(COPIES):
                runtime.memcpyAsync(*ends, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
            stream.synchronize()
            rates.append(2 * COPIES * nbytes / (time.perf_counter() - start) / 1e9)
    del rates[0]  # the warm-up
    return {
        "nbytes": nbytes,
        "copies": COPIES,
        "median_gigabytes_per_second": statistics.median(rates),
        "best_gigabytes_per_second": max(rates),
    }


def host_costs(quick: bool) -> dict[str, float]:
    """Measures the microseconds of the host for single driver calls through CuPy, and for ours."""
    import cupy
    from measure.clock import Call, host_seconds
    from measure.random_values import fill

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
