"""Measures AGN: a worker's local step, and the push once per period.

On a GPU if CuPy finds one, otherwise with both implementations of a simulated device. 16 M
parameters in 50 variables (64 M on a GPU), float32, gradients on the device; compared with
PyTorch's optimizer plus ``_foreach_add_``, NumPy's passes in blocks and a copy of as many bytes, in
the same rounds. Also the host's time of a step with 161 tiny variables, and the share of the bytes
that the busiest device of a center carries. Reports libraries that are not installed. Exit status 1
if a floor is violated.

    python bench/bench_agn.py [--json FILE] [--quick]
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from measure.agn_peers import BLOCKS, WAYS, find_agn_peers, local_sgd_in_blocks
from measure.case import OURS, Case
from measure.clock import Call, Clock, HostClock, clock_of, host_seconds
from measure.floors import Floor, counted, of_the_copy, over_the_copy, over_the_peer, times_the_peer
from measure.optim_peers import sizes_of
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
NEVER = 1 << 40  # a period that no run comes to the end of
TINY = "161 tiny variables"
PUSH = "a communication, sgd"
# Ten workers push 100 MB each to a center on four devices.
SPREAD, WORKERS, SPLIT_SIZE, CENTER_DEVICES = "ten workers push", 10, 25_000_000, 4

H100 = "H100, 2026-11"
BESIDE = "docs/benchmarks.md, 2026-11"
# name -> an optimizer, and how often a variable's bytes are read or written
RULES: dict[str, tuple[Callable[[], gr.Optimizer], int]] = {
    "sgd": (lambda: gr.GradientDescentOptimizer(0.1), 5),
    "momentum": (lambda: gr.MomentumOptimizer(0.1, 0.9), 7),
    "adam": (lambda: gr.AdamOptimizer(0.001), 9),
}
# name -> measured of the copy; the promised and the measured gain over PyTorch's fused optimizer
# and an addition
ON_GPU = {
    "sgd": ("0.97", 1.1, "1.44"),
    "momentum": ("0.97", 1.08, "1.32"),
    "adam": ("0.96", 1.05, "1.33"),
}
PUSH_UNITS = 4
FUSED = WAYS["fused"]
CPU_FLOORS = (
    Floor("numpy, local sgd over NumPy in blocks", "sgd", over_the_peer(BLOCKS, "numpy"), "<=",
          1.2, BESIDE),
    Floor("compiled, local sgd, times torch fused and add", "sgd",
          times_the_peer(FUSED, "compiled"), ">=", 1, BESIDE, ("torch",)),
    Floor("bytes of the busiest device of the center", SPREAD, counted("share of the busiest"),
          "<=", 0.3, "0.25"),
    *(
        Floor(f"{implementation}, launches of a {what}", TINY,
              counted(f"{implementation}, launches of a {what}"), "<=", 1, "1")
        for implementation in IMPLEMENTATIONS
        for what in ("step", "communication")
    ),
)  # fmt: skip
GPU_FLOORS = (
    *(
        Floor(f"local {rule}, of the copy", rule, of_the_copy("cuda"), ">=", 0.9,
              f"{measured}; {H100}")
        for rule, (measured, _, _) in ON_GPU.items()
    ),
    *(
        Floor(f"local {rule}, times torch fused and add", rule, times_the_peer(FUSED, "cuda"),
              ">=", least, f"{measured}; {H100}", ("torch",))
        for rule, (_, least, measured) in ON_GPU.items()
    ),
    Floor("a communication over its copy", PUSH, over_the_copy("cuda"), "<=", 1.2,
          f"1.03; {H100}"),
    *(
        Floor(f"launches of a {what}", TINY, counted(f"cuda, launches of a {what}"), "<=", 1,
              f"1; {H100}")
        for what in ("step", "communication")
    ),
)  # fmt: skip


class Worker:
    """A worker on one device, with a center on it or elsewhere, and its inputs."""

    def __init__(
        self,
        make: Callable[[], gr.Optimizer],
        device: Device,
        sizes: Sequence[int],
        period: int,
        *,
        center: gr.AGNCenter | None = None,
    ) -> None:
        self.getter = gr.AGNCustomGetter(device, center=center or gr.AGNCenter(device))
        self.optimizer = gr.AGNOptimizer(make(), 1, self.getter, period)
        self.variables = [
            gr.get_variable(f"v{place}", normals(size, seed=VALUES), custom_getter=self.getter)
            for place, size in enumerate(sizes)
        ]
        self.given = [device.put(normals(size, seed=GRADIENTS)) for size in sizes]
        self.pairs = list(zip(self.given, self.variables, strict=True))

    def __call__(self) -> None:
        self.optimizer.apply_gradients(self.pairs)

    def push(self) -> None:
        """Pushes the accumulated sums, without a local step."""
        worker = self.optimizer._worker
        sums = worker.variables.sums
        worker._ready_push(worker.inner._slots.powers, (), None)()
        worker.variables.sums = sums


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
        size = QUICK_SIZE if quick else GPU_SIZE if self.on_gpu else SIZE
        self.size, self.sizes = size, sizes_of(size, QUICK_VARIABLES if quick else NUM_VARIABLES)

    def implementations(self) -> Iterator[tuple[str, Device]]:
        """Maps the name of each implementation to its device."""
        for implementation, mesh in self.meshes.items():
            yield implementation, mesh.devices[0]

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    def local(self, rule: str) -> None:
        """Measures a local step over a whole model: update and accumulation."""
        make, units = RULES[rule]
        calls, absent = find_agn_peers(rule, self.sizes, place="cuda" if self.on_gpu else "cpu")
        self.absent |= absent
        if rule == "sgd" and not self.on_gpu:
            calls[BLOCKS] = local_sgd_in_blocks(self.sizes)
        workers = {
            OURS + implementation: Worker(make, device, self.sizes, NEVER)
            for implementation, device in self.implementations()
        }
        checked(rule, list(workers.values()))
        self.measure(rule, {**workers, **calls}, units)

    def push(self) -> None:
        """Measures a push: normalize, update the center, pull."""
        calls: dict[str, Call] = {}
        for implementation, device in self.implementations():
            worker = Worker(RULES["sgd"][0], device, self.sizes, NEVER)
            worker()
            calls[OURS + implementation] = worker.push
        self.measure(PUSH, calls, PUSH_UNITS)

    def measure(self, name: str, calls: dict[str, Call], units: int) -> None:
        """Measures calls that read or write all variables ``units`` times."""
        nbytes = units * 4 * self.size
        took = self.clock.measure(calls, nbytes)
        text = f"{self.size} float32 in {len(self.sizes)} variables, {units} units"
        self.keep(Case(name, text, nbytes, took))

    def tiny(self) -> None:
        """Measures the host time of a step with tiny variables."""
        number = QUICK_TINY if self.quick else len(resnet50())
        calls: dict[str, Call] = {}
        figures: dict[str, float] = {}
        for implementation, device in self.implementations():
            for what, period in (("step", NEVER), ("step and communication", 1)):
                worker = Worker(RULES["sgd"][0], device, [TINY_SIZE] * number, period)
                worker()
                calls[f"{implementation}, sgd, {what}"] = worker
                with self.meshes[implementation].journal() as journal:
                    worker()
                figures[f"{implementation}, launches of a {what}"] = journal.launches
            both = figures.pop(f"{implementation}, launches of a step and communication")
            alone = figures[f"{implementation}, launches of a step"]
            figures[f"{implementation}, launches of a communication"] = both - alone
        calls_of_a_loop = QUICK_NUMBER if self.quick else NUMBER
        seconds = host_seconds(calls, calls_of_a_loop, quick=self.quick, rounds=ROUNDS)
        figures |= {f"{name}, us": taken * 1e6 for name, taken in seconds.items()}
        self.keep(Case(TINY, f"{number} x {TINY_SIZE} float32, host us", figures=figures))

    def spread(self) -> None:
        """Measures concurrent pushes on a simulated mesh without peer access."""
        size = QUICK_SIZE if self.quick else SPLIT_SIZE
        sizes = sizes_of(size, QUICK_VARIABLES * 4 if self.quick else NUM_VARIABLES)
        figures: dict[str, float] = {}
        for number in (1, CENTER_DEVICES):
            seconds, share = pushed(number, sizes)
            figures[f"seconds, center on {number}"] = seconds
        figures["share of the busiest"] = share
        text = f"{WORKERS} threads, {4 * size} bytes each, to {CENTER_DEVICES} devices"
        self.keep(Case(SPREAD, text, figures=figures))


def pushed(num_devices: int, sizes: Sequence[int]) -> tuple[float, float]:
    """Lets ten workers push once; returns seconds and the busiest device's share of bytes."""
    places = CENTER_DEVICES + WORKERS
    with gr.open_mesh(places, backend="sim", peer_access=False, strict=False) as mesh:
        center = gr.AGNCenter(mesh[0:num_devices])
        workers = [
            Worker(RULES["sgd"][0], device, sizes, 2, center=center)
            for device in mesh.devices[CENTER_DEVICES:]
        ]
        for worker in workers:
            worker()  # the first of the period, which sends nothing
        threads = [threading.Thread(target=worker) for worker in workers]
        with mesh.journal() as journal:
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for device in mesh.devices:
                device.synchronize()
            seconds = time.perf_counter() - began
        carried = dict.fromkeys(range(num_devices), 0)
        for record in journal.of("copy"):
            for end in {record.device, record.source} & carried.keys():
                carried[end] += record.nbytes
        total = 2 * 4 * sum(sizes) * len(workers)
        assert sum(carried.values()) == total, "each sum goes there once, and each variable back"
        return seconds, max(carried.values()) / total


def checked(rule: str, workers: Sequence[Worker]) -> None:
    """Raises unless two steps have moved and summed every variable, with equal results."""
    found = []
    for worker in workers:
        worker()
        worker()
        sums = [worker.getter.accumulation(variable).numpy() for variable in worker.variables]
        if any((array != 2 * normals(array.size, seed=GRADIENTS)).any() for array in sums):
            raise AssertionError(f"{rule}: the sum of two gradients is wrong")
        found.append([variable.numpy() for variable in worker.variables])
    for arrays in found:
        if not all(np.array_equal(one, two) for one, two in zip(arrays, found[0], strict=True)):
            raise AssertionError(f"{rule}: the implementations do not agree")
        if any((array == normals(array.size, seed=VALUES)).any() for array in arrays):
            raise AssertionError(f"{rule}: not every element was moved")


def all_cases(bench: Bench) -> list[Callable[[], None]]:
    """Returns the cases in order; each frees its arrays when it ends."""
    cases: list[Callable[[], None]] = [partial(bench.local, rule) for rule in RULES]
    cases += [bench.push, bench.tiny]
    return cases if bench.on_gpu else [*cases, bench.spread]


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
