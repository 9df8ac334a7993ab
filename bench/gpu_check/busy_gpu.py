"""Tests what the host can do while a GPU is busy: watch for deadlines, drop captured steps.

CuPy's ``eventQuery``, ``streamQuery`` and ``setDevice`` keep the interpreter's lock. If the driver
lets one wait for another thread, which launches into a full queue or frees memory, no thread of
Python runs, and no watchdog notices a deadline. Here a thread does either while another makes the
queries of this package, and a third looks at the clock. The program fails if the interpreter stood
still for longer than ``DEADLINE``. Then it drops captured steps before the GPU has begun with them.
"""

import gc
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from measure.operands import fill, integers
from measure.reductions import Reduction, check, placed

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Mesh

DEADLINE = 1.0  # seconds
SLOW_SECONDS = 1.2  # of the work in front, more than the deadline
NBYTES, QUICK_NBYTES = 2**28, 2**10  # of a copy to the host: some milliseconds
MOST_COPIES = 400  # a queue holds about a thousand calls
LAUNCHES, QUICK_LAUNCHES = 5000, 5
PAUSE = 1e-3  # between two queries, as in the watchdog
STEPS, QUICK_STEPS, SIZES = 20, 2, (1000, 300_000)
STANDSTILL = "standstill"


class SlowWork:
    """Copies to the host that keep the compute queue of a device busy."""

    def __init__(self, device: Any, *, quick: bool) -> None:
        self._device = device
        self._nbytes = QUICK_NBYTES if quick else NBYTES
        self._source = fill(device.empty((self._nbytes // 4,), "float32"))
        self._target = cupy.cuda.alloc_pinned_memory(self._nbytes)
        for _ in range(2):  # the first also writes pages for the first time
            device.synchronize()
            start = time.perf_counter()
            self.submit(1)
            device.synchronize()
        seconds = time.perf_counter() - start
        self.copies = 1 if quick else min(MOST_COPIES, math.ceil(SLOW_SECONDS / seconds))

    def submit(self, copies: int) -> Any:
        """Queues copies; returns an event behind them."""
        stream, kind = self._device._stream("compute"), runtime.memcpyDeviceToHost
        ends = self._target.ptr, self._source.address
        with self._device.gpu:
            for _ in range(copies):
                runtime.memcpyAsync(*ends, self._nbytes, kind, stream.ptr)
            event = cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        self._device.mesh_state.order.add_work(self._device.compute)
        return event


def longest_of(call: Callable[[], object], number: int) -> float:
    longest = 0.0
    for _ in range(number):
        start = time.perf_counter()
        call()
        longest = max(longest, time.perf_counter() - start)
    return longest


def longest_pause(ended: threading.Event) -> float:
    """Returns the longest time between two looks at the clock, until an event is set."""
    longest, last = 0.0, time.perf_counter()
    while not ended.is_set():
        time.sleep(PAUSE)
        now = time.perf_counter()
        longest, last = max(longest, now - last - PAUSE), now
    return longest


def watched(event: Any, call: Callable[[], float], query: Callable[[], object]) -> dict[str, float]:
    """Runs a call in a thread, which returns the seconds that it was blocked.

    Makes a query again and again until the call and the work before ``event`` have ended. Returns
    the longest times meanwhile.
    """
    longest, ended, start = 0.0, threading.Event(), time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        pause, blocked = pool.submit(longest_pause, ended), pool.submit(call)
        try:
            while not blocked.done() or runtime.eventQuery(event.ptr):
                longest = max(longest, longest_of(query, 1))
                time.sleep(PAUSE)
        finally:
            ended.set()
    busy = time.perf_counter() - start
    return {"busy": busy, "blocked": blocked.result(), "query": longest, STANDSTILL: pause.result()}


def standstills(mesh: Mesh, slow: SlowWork, *, quick: bool) -> dict[str, float]:
    """Returns the longest milliseconds of each query, for each thing that another thread does."""
    device: Any = mesh.devices[0]
    out, *terms = (fill(device.empty((SIZES[0],), "float32"), seed) for seed in range(3))
    launch = partial(ops.add_n, [out], [terms], device=device)
    launch()  # compiled
    scenes: Mapping[str, Callable[[], float]] = {
        "nothing else": lambda: 0.0,
        "a full launch queue": partial(longest_of, launch, QUICK_LAUNCHES if quick else LAUNCHES),
        "cudaFree": partial(longest_of, device.trim, 1),
    }
    found: dict[str, float] = {}
    for scene, call in scenes.items():
        for name in ("eventQuery", "setDevice", "is idle"):
            device.empty((QUICK_NBYTES if quick else NBYTES,), "uint8")  # memory that trim frees
            mesh.synchronize()
            event = slow.submit(slow.copies)
            query: Callable[[], object] = {
                "eventQuery": partial(runtime.eventQuery, event.ptr),
                "setDevice": partial(runtime.setDevice, device.physical),
                "is idle": device._is_idle,
            }[name]
            for figure, taken in watched(event, call, query).items():
                found[f"{scene}, {name}: {figure}, ms"] = taken * 1e3
    wanted = np.add(*(term.numpy() for term in terms))
    np.testing.assert_array_equal(out.numpy(), wanted, "add_n behind slow work")
    return found


def dropped(mesh: Mesh, slow: SlowWork, number: int) -> int:
    """Calls and drops captured steps; returns how many results were compared."""
    for turn in range(number):
        slow.submit(max(1, slow.copies // number))
        results = called_and_dropped(mesh, turn)
        gc.collect()
        for device in mesh:  # takes and writes whatever memory was freed too early
            for size in SIZES:
                fill(device.empty((size,), "float32"))
        arrays = [[buffer.numpy() for buffer in result.buffers] for result in results]
        check(arrays, [integers(size, turn) for size in SIZES])
    return number * len(SIZES) * len(mesh)


def called_and_dropped(mesh: Mesh, turn: int) -> Sequence[Any]:
    """Returns the results of a captured step, which nothing holds any more."""
    values = placed(mesh, [(size,) for size in SIZES], first=turn)
    results: Sequence[Any] = Reduction(mesh, values).captured()()
    return results


def measured(quick: bool) -> dict[str, float]:
    with gr.open_mesh([0, 0], backend="cuda") as mesh:
        slow = SlowWork(mesh.devices[0], quick=quick)
        figures = standstills(mesh, slow, quick=quick)
        compared = dropped(mesh, slow, QUICK_STEPS if quick else STEPS)
    print(figures)
    for name, taken in figures.items():
        if STANDSTILL in name and taken > DEADLINE * 1e3:
            raise AssertionError(f"{name}: {taken:.0f}: no watchdog could notice a deadline")
    return {**figures, "compared results of dropped steps": compared}
