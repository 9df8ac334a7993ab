"""Host time of steps over many tensors, on a driver that does nothing; needs neither GPU nor CuPy.

``figures`` must run in a process of its own, where ``stub_cupy`` becomes CuPy.
"""

from __future__ import annotations

import gc
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradreduce as gr

from . import stub_cupy
from .reductions import Reduction

NUM_LOGICAL, SIZE = 4, 16  # of one GPU; elements of float32
LOOPS, CALLS = 20, 200


def figures(counts: Sequence[int]) -> list[dict[str, float]]:
    """Returns what steps over each number of tensors take; in a process without CuPy."""
    stub_cupy.install()
    gc.disable()  # which would look at all tensors again and again; ``capture`` pauses it anyway
    return [figures_of(count) for count in counts]


def figures_of(count: int) -> dict[str, float]:
    """Returns times and counts of one all-reduce, one update and one joint apply of all tensors.

    The tensors of the all-reduce are reduced where they lie, without packs.
    """
    mesh = gr.open_mesh([0] * NUM_LOGICAL, backend="cuda")
    first, shape = mesh.devices[0], (SIZE,)
    values = [
        gr.PerReplica([device.empty(shape, "float32") for device in mesh], mesh)
        for _ in range(count)
    ]
    reduction = Reduction(mesh, values, 0)
    start = time.process_time()
    captured = reduction.captured()
    found = {"first plan, s": time.process_time() - start}
    captured()
    found |= counted(mesh, "captured step", captured)
    for name, step in (("captured", captured), ("prepared", reduction.prepared())):
        step()
        # The best of several loops.
        taken = timeit.repeat(step, repeat=LOOPS, number=CALLS, timer=time.process_time)
        found[f"{name} step, us"] = min(taken) / CALLS * 1e6
        found[f"{name} step, Python calls"] = python_calls(step)
    grads = [value.buffers[0] for value in values]
    variables = [gr.Variable(np.zeros(shape, np.float32), device=first) for _ in range(count)]
    sums = [gr.ConditionalAccumulator("float32", shape, device=first) for _ in range(count)]
    update = gr.GradientDescentOptimizer(0.5).apply_gradients
    pairs = list(zip(grads, variables, strict=True))
    found |= counted(mesh, "apply_gradients", partial(update, pairs))
    found |= counted(mesh, "apply_grads", partial(gr.apply_grads, sums, grads, 0))
    return found


def counted(mesh: gr.Mesh, name: str, call: Callable[[], Any]) -> dict[str, float]:
    """Returns the launches and uploads of a call; a pointer table that is built is an upload."""
    with mesh.journal() as journal:
        call()
    return {f"{name}, launches": journal.launches, f"{name}, uploads": journal.uploads}


def python_calls(call: Callable[[], Any]) -> int:
    """Returns how many functions of Python and C a call calls."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    return events.count("call") + events.count("c_call")
