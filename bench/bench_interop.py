"""Measures the conversion of one array in and out, compared with the library's own conversion.

Floors: 5 us per array, in and out, for NumPy and PyTorch; for JAX 1.2 times JAX's own conversion.
Reports libraries that are not installed. Exit status 1 if a floor is violated.

    python bench/bench_interop.py [--json FILE] [--quick]
"""

from __future__ import annotations

import importlib.util
import os
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from measure.case import OURS, Case
from measure.clock import Took
from measure.floors import Floor, counted, over_the_peer
from measure.report import finish, options_of, report_of

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.arrays.convert_gpu import Kind

REPEATS = 9
BOTH_WAYS, OWN = "in and out", "own conversion"
# On a quiet x86-64 server core, 2026-11.
FLOORS = (
    Floor("numpy, us in and out", "numpy", counted("us in and out"), "<=", 5, "3.3"),
    Floor("torch, us in and out", "torch", counted("us in and out"), "<=", 5, "3.9", ("torch",)),
    Floor("jax, over its own", "jax", over_the_peer(OWN, BOTH_WAYS), "<=", 1.2, "1.13", ("jax",)),
)


def microseconds(call: Callable[[], Any], number: int) -> float:
    """Returns the time of a call, the best of several loops."""
    return min(timeit.repeat(call, number=number, repeat=REPEATS)) / number * 1e6


class Bench:
    """Measures each library that is installed."""

    def __init__(self, *, quick: bool) -> None:
        self.fewer = 100 if quick else 1  # divides the number of calls
        self.cases: dict[str, Case] = {}
        self.absent: dict[str, str] = {}

    def run(self) -> None:
        """Runs all cases."""
        host = np.zeros(100, np.float32)
        self.case("numpy", host, np.asarray, 20_000)
        for library in ("torch", "jax"):
            if importlib.util.find_spec(library) is None:
                self.absent[library] = "not installed"
        if "torch" not in self.absent:
            import torch

            self.case("torch", torch.zeros(100), lambda t: torch.from_numpy(t.numpy()), 20_000)
        if "jax" not in self.absent:
            import jax
            import jax.numpy as jnp

            def own(array: Any) -> Any:
                np.asarray(array)
                return jax.dlpack.from_dlpack(host)

            self.case("jax", jnp.zeros(100), own, 1_000)

    def case(self, kind: Kind, array: Any, own: Callable[[Any], Any], number: int) -> None:
        """Measures the conversion of an array, and that of its library."""
        number //= self.fewer
        device = gr.open_mesh(1, backend="sim").devices[0]
        result = device.upload(np.zeros(100, np.float32))  # what goes out is our own memory
        ours = microseconds(lambda: to_buffer(array, device), number)
        ours += microseconds(lambda: from_buffer(result, kind), number)
        theirs = microseconds(lambda: own(array), number)
        took = {
            name: Took(us / 1e6, us / 1e6)
            for name, us in ((f"{OURS}{BOTH_WAYS}", ours), (OWN, theirs))
        }
        figures = {"us in and out": ours, "us, own conversion": theirs}
        self.cases[kind] = Case(kind, "100 float32", 0, took, figures)
        self.cases[kind].show()


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    load = os.getloadavg()[0]
    bench = Bench(quick=options.quick)
    bench.run()
    finish(report_of(["numpy"], load, bench, FLOORS, quick=options.quick), options.json)


if __name__ == "__main__":
    main()
