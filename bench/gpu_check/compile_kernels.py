"""Compiles every kernel on all cores, so that later checks find all of them in the cache on disk.

    python -m gpu_check.compile_kernels [--json FILE] [--quick]

One after another they take a minute or more, in which no check would have come further.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from measure.report import keep, options_of

import gradreduce as gr
from gradreduce import ops

MOST_PROCESSES = 16  # each has a context on the GPU, of half a gigabyte
QUICK_TEMPLATES = 3


def compile_some(first: int, step: int, most: int | None = None) -> int:
    """Compiles every ``step``-th template from the ``first``; returns how many."""
    templates = [(kernel, each) for kernel in ops.KERNELS for each in kernel.templates]
    chosen = templates[first::step][:most]
    with gr.open_mesh(1, backend="cuda") as mesh:
        for kernel, template in chosen:
            mesh.devices[0].compile_kernel(kernel, template)
    return len(chosen)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles, and saves the number of templates and the seconds."""
    options = options_of(__doc__, arguments)
    start, processes = time.perf_counter(), min(MOST_PROCESSES, os.cpu_count() or 1)
    if options.quick:  # on the fake GPU, which other processes do not have
        processes, compiled = 1, compile_some(0, 1, QUICK_TEMPLATES)
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            step = [processes] * processes
            compiled = sum(pool.map(compile_some, range(processes), step))
    seconds = time.perf_counter() - start
    keep({"templates": compiled, "processes": processes, "seconds": seconds}, options.json)


if __name__ == "__main__":
    main()
