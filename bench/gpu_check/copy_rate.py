"""Measures the rate of copies within GPU memory, the baseline of other figures.

    python -m gpu_check.copy_rate [--json FILE] [--quick]

Counts the bytes read and the bytes written. The host's clock measures many copies, which are all
queued before the first has ended, so that the host does not limit the rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import cupy
from cupy.cuda import runtime
from measure.random_values import fill
from measure.runner import keep, options_of

import gradreduce as gr

NBYTES, QUICK_NBYTES = 2**30, 2**16  # far more than any cache holds
COPIES = 40  # of one round, some 0.02 s on a GPU of 4 TB/s
ROUNDS = 5


def rates(nbytes: int) -> list[float]:
    """Returns the GB/s of each round, counting reads and writes."""
    made = []
    with gr.open_mesh(1, backend="cuda") as mesh:
        (device,) = mesh.devices
        shape = (nbytes // 4,)
        source, target = (fill(device.empty(shape, "float32"), seed) for seed in range(2))
        mesh.synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            for _ in range(COPIES):
                kind = runtime.memcpyDeviceToDevice
                runtime.memcpyAsync(target.address, source.address, nbytes, kind, stream.ptr)
            stream.synchronize()
            made.append(2 * COPIES * nbytes / (time.perf_counter() - start) / 1e9)
    return made[1:]  # the first was the warm-up


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and saves the figures."""
    options = options_of(__doc__, arguments)
    nbytes = QUICK_NBYTES if options.quick else NBYTES
    found = sorted(rates(nbytes))
    figures = {
        "nbytes": nbytes,
        "copies": COPIES,
        "median_gigabytes_per_second": found[len(found) // 2],
        "best_gigabytes_per_second": found[-1],
    }
    print(json.dumps(figures))
    keep(figures, options.json)


if __name__ == "__main__":
    main()
