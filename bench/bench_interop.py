"""Measures the conversion of one array in and out, compared with the library's own conversion."""

from collections.abc import Callable
from typing import Any

import numpy as np
from measure.case import OURS, Floor, counted, over
from measure.clock import Call, host_seconds
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, to_buffer
from gradreduce.arrays.convert_gpu import Kind

ROUNDS = 9
BOTH_WAYS, OWN = "in and out", "own conversion"
# On a quiet x86-64 server core, 2026-11.
FLOORS = (
    Floor("numpy, us in and out", "numpy", counted("us in and out"), "<=", 5, "3.3"),
    Floor("torch, us in and out", "torch", counted("us in and out"), "<=", 5, "3.9", ("torch",)),
    Floor("jax, over its own", "jax", over(OWN, BOTH_WAYS), "<=", 1.2, "1.13", ("jax",)),
)


def case(
    bench: Bench, kind: Kind, array: Any, own: Callable[[Any], Any], number: int = 20_000
) -> None:
    """Measures the conversion of an array, and that of its library."""
    number = bench.pick(number, number // 100)
    device = gr.open_mesh(1, backend="sim").devices[0]
    result = device.upload(np.zeros(100, np.float32))  # what goes out is our own memory
    calls: dict[str, Call] = {
        "in": lambda: to_buffer(array, device),
        "out": lambda: from_buffer(result, kind),
        OWN: lambda: own(array),
    }
    took = host_seconds(calls, number, quick=bench.quick, rounds=ROUNDS)
    seconds = {f"{OURS}{BOTH_WAYS}": took["in"] + took["out"], OWN: took[OWN]}
    figures = {f"us {name.removeprefix(OURS)}": 1e6 * each for name, each in seconds.items()}
    bench.note(kind, "100 float32", figures, seconds)


def cases(bench: Bench) -> None:
    host = np.zeros(100, np.float32)
    case(bench, "numpy", host, np.asarray)
    if bench.has("torch"):
        import torch

        case(bench, "torch", torch.zeros(100), lambda tensor: torch.from_numpy(tensor.numpy()))
    if bench.has("jax"):
        import jax
        import jax.numpy as jnp

        def own(array: Any) -> Any:
            np.asarray(array)
            return jax.dlpack.from_dlpack(host)

        case(bench, "jax", jnp.zeros(100), own, 1_000)


BENCHMARK = Benchmark(__doc__, cases, FLOORS)

if __name__ == "__main__":
    BENCHMARK.main()
