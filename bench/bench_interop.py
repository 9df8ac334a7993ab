"""Measures the conversion of one array in and out, compared with the library's own conversion.

Budgets: 5 us per array, in and out, for NumPy and PyTorch; for JAX 1.2 times JAX's own conversion.
Reports libraries that are not installed. Exit status 1 if a budget is exceeded.

    python bench/bench_interop.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.arrays.convert import from_buffer, to_buffer

REPEATS = 9
# library -> which figure, and the most that it may be. numpy 3.3 us, torch 3.9 us, jax 1.13 on a
# quiet x86-64 server core, 2026-11.
BUDGETS = {"numpy": ("in_and_out_us", 5.0), "torch": ("in_and_out_us", 5.0), "jax": ("ratio", 1.2)}


def microseconds(call: Callable[[], Any], number: int) -> float:
    """Returns the time of a call, the best of several loops."""
    return min(timeit.repeat(call, number=number, repeat=REPEATS)) / number * 1e6


def measure(kind: str, array: Any, own: Callable[[Any], Any], number: int) -> dict[str, float]:
    mesh = gr.open_mesh(1, backend="sim")
    device = mesh.devices[0]
    result = device.upload(np.zeros(100, np.float32))  # what goes out is our own memory
    ours = microseconds(lambda: to_buffer(array, device), number)
    ours += microseconds(lambda: from_buffer(result, kind), number)
    theirs = microseconds(lambda: own(array), number)
    print(f"{kind:8} {ours:8.2f} us in and out   own conversion {theirs:8.2f} us   "
          f"ratio {ours / theirs:5.2f}")  # fmt: skip
    return {"in_and_out_us": ours, "own_conversion_us": theirs, "ratio": ours / theirs}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="few calls: only shows that it runs")
    options = parser.parse_args(arguments)
    figures = measured(100 if options.quick else 1)
    if options.json is not None:
        options.json.write_text(json.dumps(figures), encoding="utf-8")
    exceeded = [
        f"{library}: {found[figure]:.2f} {figure}, at most {most}"
        for library, found in figures.items()
        for figure, most in [BUDGETS[library]]
        if found[figure] > most
    ]
    if exceeded and not options.quick:
        sys.exit("\n".join(exceeded))


def measured(fewer: int) -> dict[str, dict[str, float]]:
    """Measures each library; ``fewer`` divides the number of calls."""
    host = np.zeros(100, np.float32)
    figures = {"numpy": measure("numpy", host, np.asarray, 20_000 // fewer)}
    if importlib.util.find_spec("torch"):
        import torch

        figures["torch"] = measure(
            "torch", torch.zeros(100), lambda t: torch.from_numpy(t.numpy()), 20_000 // fewer
        )
    else:
        print("torch    not installed")
    if importlib.util.find_spec("jax"):
        import jax
        import jax.numpy as jnp

        def own(array: Any) -> Any:
            np.asarray(array)
            return jax.dlpack.from_dlpack(host)

        figures["jax"] = measure("jax", jnp.zeros(100), own, 1_000 // fewer)
    else:
        print("jax      not installed")
    return figures


if __name__ == "__main__":
    main()
