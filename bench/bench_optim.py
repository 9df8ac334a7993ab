"""Measures an optimizer's step over all variables of a model, compared with PyTorch's optimizers.

On a GPU if CuPy finds one, otherwise with both implementations of a simulated device. 16 M
parameters in 50 variables (64 M on a GPU), float32, gradients on the device; compared with
PyTorch's loop, foreach and fused optimizers, NumPy's passes in blocks and a copy of as many bytes,
in the same rounds. Also the host's time of a step with 161 tiny variables. Reports libraries that
are not installed. Exit status 1 if a floor is violated.

    python bench/bench_optim.py [--json FILE] [--quick]
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from measure.case import OURS, Case
from measure.clock import Call, Clock, HostClock, clock_of, host_seconds
from measure.floors import Decision, Floor, counted, of_the_copy, over_the_peer, times_the_peer
from measure.optim_peers import BLOCKS, find_optim_peers, sgd_in_blocks, sizes_of
from measure.random_values import GRADIENTS, VALUES, normals
from measure.report import finish, options_of, report_of
from measure.resnet50 import resnet50
from measure.setting import IMPLEMENTATIONS, one_device

import gradreduce as gr
from gradreduce.device import Device, Mesh

SIZE, GPU_SIZE, QUICK_SIZE = 16_000_000, 64_000_000, 2_000
NUM_VARIABLES, QUICK_VARIABLES = 50, 5
TINY_SIZE, QUICK_TINY = 16, 12
ROUNDS = 25  # on a CPU, of which the best one counts
NUMBER, QUICK_NUMBER = 20, 2
TINY = "161 tiny variables"
ROWS, WIDTH, NUM_ROWS, QUICK_ROWS = 20_000, 64, 100_000, 100
SPARSE = "sparse adam, lazy"
LOST = 1e-3  # RMSProp's first step of such a gradient is 1e-6; rounding near 4 loses less than 3e-7

NOT_YET = "not yet measured on a GPU"
H100 = "H100, 2026-11"
BESIDE = "docs/benchmarks.md, 2026-11"
# name -> an optimizer, and how often a variable's bytes are read or written
RULES: dict[str, tuple[Callable[[], gr.Optimizer], int]] = {
    "sgd": (lambda: gr.GradientDescentOptimizer(0.1), 3),
    "momentum": (lambda: gr.MomentumOptimizer(0.1, 0.9), 5),
    "adam": (lambda: gr.AdamOptimizer(0.001), 7),
    "adagrad": (lambda: gr.AdagradOptimizer(0.1), 5),
    "rmsprop": (lambda: gr.RMSPropOptimizer(0.001, momentum=0.9), 7),
}
PROMISED = ("sgd", "momentum", "adam")
CPU_FLOORS = (
    Floor("numpy, sgd over NumPy in blocks", "sgd", over_the_peer(BLOCKS, "numpy"), "<=", 1.2,
          BESIDE),
    Floor("numpy, adam, times torch foreach", "adam", times_the_peer("torch foreach", "numpy"),
          ">=", 2, BESIDE, ("torch",)),
    Floor("compiled, adam, times torch fused", "adam", times_the_peer("torch fused", "compiled"),
          ">=", 0.85, BESIDE, ("torch",)),
    *(
        Floor(f"compiled, {rule}, over torch fused", rule, over_the_peer("torch fused", "compiled"),
              "<=", most, BESIDE, ("torch",))
        for rule, most in (("sgd", 1.25), ("momentum", 1.1))
    ),
    *(
        Floor(f"{implementation}, sgd{of}, us of a step", TINY,
              counted(f"{implementation}, sgd{of}, us"), "<=", 400, BESIDE)
        for implementation in IMPLEMENTATIONS
        for of in ("", " of NumPy arrays")
    ),
    *(
        Floor(f"{implementation}, launches of a step", TINY, counted(f"{implementation}, launches"),
        "<=", 1, "1") for implementation in IMPLEMENTATIONS
    ),
)  # fmt: skip
IN_PLACE = (
    "both are limited by memory and faster than a copy of the bytes; C++ loops with AVX2 or "
    "AVX-512, prefetching or huge pages took 0.95 to 1.1 of the time (bench/README.md); runs "
    "measured {}"
)
DECISIONS = {
    "compiled, adam, times torch fused": Decision(1, IN_PLACE.format("0.95 to 1.03")),
    "compiled, sgd, over torch fused": Decision(1.1, IN_PLACE.format("1.13 to 1.15")),
    "sgd, times torch loop": Decision(
        2,
        "it was set before there was a GPU; PyTorch's loop moves as many bytes, and loses only "
        "time between its 50 launches",
    ),
    "momentum, times torch loop": Decision(
        2,
        "it was set before there was a GPU; PyTorch's loop moves 8 units instead of 5, 1.6 times "
        "as many; the rest was the time of the H100's host",
    ),
}
# rule -> measured of the copy; the promise and the measured gain over PyTorch's fused optimizer,
# and over its loop
ON_GPU = {
    "sgd": ("0.98", (1, "1.25"), (1.4, "1.56")),
    "momentum": ("0.98", (1, "1.17"), (1.6, "1.99")),
    "adam": ("0.97", (1, "1.22"), (2, "5.2")),
}
GPU_FLOORS = (
    *(
        Floor(f"{rule}, of the copy", rule, of_the_copy("cuda"), ">=", 0.9, f"{measured}; {H100}")
        for rule, (measured, *_) in ON_GPU.items()
    ),
    *(
        Floor(f"{rule}, times torch {way}", rule, times_the_peer(f"torch {way}", "cuda"), ">=",
              least, f"{measured}; {H100}", ("torch",))
        for rule, (_, *times) in ON_GPU.items()
        for way, (least, measured) in zip(("fused", "loop"), times, strict=True)
    ),
    Floor("launches of a step", TINY, counted("cuda, launches"), "<=", 1, NOT_YET),
)  # fmt: skip


def hosts(sizes: Sequence[int], seed: int) -> list[np.ndarray]:
    return [normals(size, seed=seed) for size in sizes]


class Step:
    """An optimizer with variables and gradients on one device."""

    def __init__(
        self,
        make: Callable[[], gr.Optimizer],
        device: Device,
        sizes: Sequence[int],
        *,
        on_host: bool = False,
    ):
        self.optimizer = make()
        self.device = device
        self.variables = [gr.Variable(each, device=device) for each in hosts(sizes, VALUES)]
        given = [each if on_host else device.put(each) for each in hosts(sizes, GRADIENTS)]
        self.pairs = list(zip(given, self.variables, strict=True))

    def __call__(self) -> None:
        self.optimizer.apply_gradients(self.pairs)


class Bench:
    """One device, its implementations, its peers, and the measurements on it."""

    def __init__(self, meshes: dict[str, Mesh], *, quick: bool) -> None:
        self.meshes = meshes
        self.on_gpu = "cuda" in meshes
        self.quick = quick
        (*_, mesh) = meshes.values()
        best = HostClock(quick, of_rounds=min, rounds=ROUNDS)
        self.clock: Clock = clock_of(mesh, quick=quick) if self.on_gpu else best
        self.absent: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def implementations(self) -> Iterator[tuple[str, Device]]:
        """Maps the name of each implementation to its device."""
        for implementation, mesh in self.meshes.items():
            yield implementation, mesh.devices[0]

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    def rule(self, rule: str) -> None:
        """Measures a step over a whole model."""
        make, units = RULES[rule]
        size = QUICK_SIZE if self.quick else GPU_SIZE if self.on_gpu else SIZE
        sizes = sizes_of(size, QUICK_VARIABLES if self.quick else NUM_VARIABLES)
        calls: dict[str, Call] = {}
        if rule in PROMISED:
            place = "cuda" if self.on_gpu else "cpu"
            values, gradients = hosts(sizes, VALUES), hosts(sizes, GRADIENTS)
            calls, absent = find_optim_peers(rule, values, gradients, place=place)
            self.absent |= absent
            if rule == "sgd" and not self.on_gpu:
                calls[BLOCKS] = sgd_in_blocks(values, gradients)
        steps = {
            OURS + implementation: Step(make, device, sizes)
            for implementation, device in self.implementations()
        }
        checked(rule, list(steps.values()))
        nbytes = units * 4 * size
        took = self.clock.measure({**steps, **calls}, nbytes)
        self.keep(Case(rule, f"{size} float32 in {len(sizes)} variables", nbytes, took))

    def tiny(self) -> None:
        """Measures the host time of a step with tiny variables."""
        number = QUICK_TINY if self.quick else len(resnet50())
        calls: dict[str, Call] = {}
        figures: dict[str, float] = {}
        for implementation, device in self.implementations():
            for rule in PROMISED:
                step = Step(RULES[rule][0], device, [TINY_SIZE] * number)
                step()
                calls[f"{implementation}, {rule}"] = step
            arrays = Step(RULES["sgd"][0], device, [TINY_SIZE] * number, on_host=True)
            arrays()
            calls[f"{implementation}, sgd of NumPy arrays"] = arrays
            with self.meshes[implementation].journal() as journal:
                step()
            figures[f"{implementation}, launches"] = journal.launches
        calls_of_a_loop = QUICK_NUMBER if self.quick else NUMBER
        seconds = host_seconds(calls, calls_of_a_loop, quick=self.quick, rounds=ROUNDS)
        figures |= {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
        self.keep(Case(TINY, f"{number} x {TINY_SIZE} float32, host us of a step", figures=figures))

    def sparse(self) -> None:
        """Measures a sparse update of a table: merge, gather, update, scatter."""
        rows = QUICK_ROWS if self.quick else ROWS
        shape = (NUM_ROWS * rows // ROWS, WIDTH)
        indices = np.random.default_rng(0).integers(0, shape[0], rows)
        calls: dict[str, Call] = {}
        for implementation, device in self.implementations():
            values = normals(math.prod(shape), seed=VALUES).reshape(shape)
            gradients = normals(rows * WIDTH, seed=GRADIENTS).reshape(rows, WIDTH)
            variable = gr.Variable(values, device=device)
            slices = gr.IndexedSlices(device.put(gradients), indices, shape)
            optimizer = gr.AdamOptimizer(0.001, lazy=True)
            calls[OURS + implementation] = partial(optimizer.apply_gradients, [(slices, variable)])
        nbytes = 7 * 4 * rows * WIDTH
        took = self.clock.measure(calls, nbytes)
        self.keep(Case(SPARSE, f"{rows} rows of {shape[0]} x {WIDTH} float32", nbytes, took))


def checked(rule: str, steps: Sequence[Step]) -> None:
    """Raises unless one step has moved every variable, with equal results."""
    found = []
    for step in steps:
        step()
        found.append([variable.numpy() for variable in step.variables])
    for arrays in found:
        if not all(np.array_equal(one, two) for one, two in zip(arrays, found[0], strict=True)):
            raise AssertionError(f"{rule}: the implementations do not agree")
        if not all(map(is_moved, arrays)):
            raise AssertionError(f"{rule}: not every element was moved")


def is_moved(array: np.ndarray) -> bool:
    """Returns whether all elements have new values, but for updates that rounding may undo."""
    lost = np.abs(normals(array.size, seed=GRADIENTS)) < LOST
    return bool((lost | (array != normals(array.size, seed=VALUES))).all())


def all_cases(bench: Bench) -> list[Callable[[], None]]:
    """Returns the cases in order; each frees its arrays when it ends."""
    return [*(partial(bench.rule, rule) for rule in RULES), bench.tiny, bench.sparse]


# -- the run ---------------------------------------------------------------------------------------


def measured(found: dict[str, Mesh], *, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    bench = Bench(found, quick=quick)
    print(f"{', '.join(found)}; load average {load:.2f}")
    for case in all_cases(bench):
        case()
    floors = GPU_FLOORS if bench.on_gpu else CPU_FLOORS
    return report_of(list(found), load, bench, floors, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    with ExitStack() as stack:
        found = one_device()
        for mesh in found.values():
            stack.enter_context(mesh)
        report = measured(found, quick=options.quick)
    finish(report, options.json)


if __name__ == "__main__":
    main()
