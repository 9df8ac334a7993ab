"""Runs a benchmark: opens its devices, measures its cases in turns, checks floors, writes JSON.

The way of a case: a function of ``bench_*.py`` makes its candidates, ours and the peers'. A method
of ``Bench`` measures them in turns, prints the ``Case`` and keeps it. ``Benchmark`` checks the
floors, which name figures of cases, and returns the report. ``main`` writes it as JSON. From the
JSON and the floors ``page.py`` writes the pages; ``record.py`` calls both.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import gradreduce as gr
from gradreduce.backends import Kernels
from gradreduce.device import Device, Mesh

from .case import OURS, Case, Figures, Floor, kept
from .clock import Call, Calls, GpuClock, HostClock, host_seconds, took_of

T = TypeVar("T")
NONE: Mapping[str, Any] = MappingProxyType({})
IMPLEMENTATIONS: tuple[Kernels, ...] = ("numpy", "compiled")


def has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def gpu_name() -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


class Bench:
    """The devices of a benchmark, and what it has measured.

    ``quick`` means tiny sizes and few rounds. ``meshes`` maps an implementation, ``cuda`` for a
    GPU, to its devices. ``host_clock`` makes the clock of a machine without a GPU.
    """

    def __init__(self, *, quick: bool, on_gpu: bool = False, meshes: Mapping[str, Mesh] = NONE,
                 host_clock: Callable[[bool], HostClock] = HostClock):  # fmt: skip
        self.quick = quick
        self.on_gpu = on_gpu
        self.place = "cuda" if on_gpu else "cpu"  # of PyTorch's tensors
        self.meshes = dict(meshes)
        self._host_clock = host_clock
        self.cases: dict[str, Case] = {}  # by name
        self.absent: dict[str, str] = {}  # why a library or device is missing

    @cached_property
    def clock(self) -> HostClock | GpuClock:
        """The clock for work on the first device of ``meshes``."""
        return self.clock_of(next(iter(self.meshes.values())))

    def clock_of(self, mesh: Mesh) -> HostClock | GpuClock:
        """Returns the clock for work on the first device of a mesh."""
        if self.on_gpu:
            return GpuClock(mesh.devices[0], quick=self.quick)
        return self._host_clock(self.quick)

    def pick(self, size: T, quick: T, on_gpu: T | None = None) -> T:
        """Returns a size for this run; ``on_gpu`` is ``size`` by default."""
        if self.quick:
            return quick
        return size if on_gpu is None or not self.on_gpu else on_gpu

    def devices(self) -> Iterator[tuple[str, Device]]:
        """Yields each implementation with its first device."""
        for implementation, mesh in self.meshes.items():
            yield implementation, mesh.devices[0]

    def ours(self, make: Callable[[Device], T]) -> dict[str, T]:
        """Returns our candidates, by the name that a table shows."""
        return {OURS + implementation: make(device) for implementation, device in self.devices()}

    def has(self, library: str) -> bool:
        """Returns whether a library is installed, and notes if it is not."""
        if importlib.util.find_spec(library) is None:
            self.absent[library] = "not installed"
        return library not in self.absent

    def launches(self, implementation: str, call: Call) -> int:
        with self.meshes[implementation].journal() as journal:
            call()
        return journal.launches

    def host_us(
        self, calls: Calls, number: int, unit: str = "us", divisor: int = 1, **options: Any
    ) -> dict[str, float]:
        """Returns the host's microseconds of a call or of a part of it, as figures with their unit.

        The further options are those of ``host_seconds``.
        """
        seconds = host_seconds(calls, number, quick=self.quick, **options)
        for mesh in self.meshes.values():
            mesh.synchronize()
        return {f"{name}, {unit}": taken * 1e6 / divisor for name, taken in seconds.items()}

    def compare(
        self, name: str, size: str, nbytes: int, calls: Calls, figures: Figures = NONE
    ) -> None:
        """Keeps the times of candidates, and of a copy that moves as many bytes, in turns."""
        self.keep(Case(name, size, nbytes, self.clock.measure(calls, nbytes), dict(figures)))

    def note(self, name: str, size: str, figures: Figures, seconds: Figures = NONE) -> None:
        """Keeps figures, and seconds by candidate, that were measured without a copy."""
        self.keep(Case(name, size, 0, took_of(seconds), figures))

    def keep(self, case: Case) -> None:
        case.show()
        self.cases[case.name] = case


@dataclass(frozen=True)
class Benchmark:
    doc: str | None
    cases: Callable[[Bench], None]  # runs all; each frees its arrays when it ends
    floors: Sequence[Floor]  # for a machine without GPUs
    gpu_floors: Sequence[Floor] | None = None  # None if it does not use GPUs
    num_devices: int = 0  # that are opened for it: simulated devices,
    placement: Sequence[int] = (0,)  # or these GPUs
    host_clock: Callable[[bool], HostClock] = HostClock
    implementation: str = "numpy"  # of the kernels, if no devices are opened for it

    def floors_of(self, *, on_gpu: bool) -> Sequence[Floor]:
        """Returns the floors for a kind of machine."""
        return self.floors if self.gpu_floors is None or not on_gpu else self.gpu_floors

    def measured(self, *, quick: bool) -> Bench:
        on_gpu = self.gpu_floors is not None and has_gpu()
        with ExitStack() as stack:
            meshes: dict[str, Mesh] = {}
            if self.num_devices and on_gpu:
                meshes["cuda"] = stack.enter_context(gr.open_mesh(self.placement, backend="cuda"))
            elif self.num_devices:
                for kernels in IMPLEMENTATIONS:
                    mesh = gr.open_mesh(
                        self.num_devices, backend="sim", kernels=kernels, strict=False
                    )
                    meshes[kernels] = stack.enter_context(mesh)
            bench = Bench(quick=quick, on_gpu=on_gpu, meshes=meshes, host_clock=self.host_clock)
            self.cases(bench)
        return bench

    def report(self, *, quick: bool) -> dict[str, Any]:
        """Runs all cases; returns a report for JSON."""
        load = os.getloadavg()[0]
        print(f"load average {load:.2f}")
        bench = self.measured(quick=quick)
        for library, why in bench.absent.items():
            print(f"{library}: {why}")
        floors = self.floors_of(on_gpu=bench.on_gpu)
        names = list(bench.meshes) or [self.implementation]
        return {
            "implementations": ["cuda"] if bench.on_gpu else names,
            "load_average": load,
            "absent": bench.absent,
            "cases": [asdict(case) for case in bench.cases.values()],
            "floors": [] if quick else kept(floors, bench.cases, bench.absent),
        }

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measures and writes the report; exits with 1 if a floor is broken."""
        parser = argparse.ArgumentParser(description=(self.doc or "").splitlines()[0])
        parser.add_argument("--json", type=Path, help="where the figures go")
        parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
        options = parser.parse_args(arguments)
        if not has_gpu():
            os.environ.setdefault("GRADREDUCE_BACKEND", "sim")  # of default meshes: no warning
        report = self.report(quick=options.quick)
        if options.json is not None:
            options.json.write_text(json.dumps(report), encoding="utf-8")
        broken = [one["floor"] for one in report["floors"] if one["holds"] is False]
        if broken:
            sys.exit(f"broken floors: {', '.join(broken)}")
