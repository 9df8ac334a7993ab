"""Runs a benchmark: opens its devices, measures its cases in turns, checks floors, writes JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import gradreduce as gr
from gradreduce.backends import Kernels
from gradreduce.device import Device, Mesh

from .case import OURS, Case
from .clock import Call, GpuClock, HostClock, host_seconds
from .floors import Floor, kept

T = TypeVar("T")
IMPLEMENTATIONS: tuple[Kernels, ...] = ("numpy", "compiled")


def has_gpu() -> bool:
    """Returns whether CuPy is installed and finds a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def gpu_name() -> str:
    """Returns the name of the first GPU."""
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


def simulated(num_devices: int) -> dict[str, Mesh]:
    """Opens simulated devices with both implementations; close them."""
    return {
        name: gr.open_mesh(num_devices, backend="sim", kernels=name, strict=False)
        for name in IMPLEMENTATIONS
    }


def named(figures: Mapping[str, float], unit: str = "us") -> dict[str, float]:
    """Returns figures with their unit in their names."""
    return {f"{name}, {unit}": figure for name, figure in figures.items()}


class Bench:
    """The devices of a benchmark, and what it has measured.

    Args:
        quick: tiny sizes and few rounds.
        on_gpu: whether GPUs are measured.
        meshes: implementation -> its devices; ``cuda`` for a GPU.
        host_clock: makes the clock of a machine without a GPU.

    Attributes:
        place: where PyTorch's tensors belong: ``"cuda"`` or ``"cpu"``.
        cases: the measured cases, by name.
        absent: why a library or device is missing, by its name.
    """

    def __init__(
        self,
        *,
        quick: bool,
        on_gpu: bool = False,
        meshes: Mapping[str, Mesh] | None = None,
        host_clock: Callable[[bool], HostClock] = HostClock,
    ) -> None:
        self.quick = quick
        self.on_gpu = on_gpu
        self.place = "cuda" if on_gpu else "cpu"
        self.meshes = dict(meshes or {})
        self._host_clock = host_clock
        self.cases: dict[str, Case] = {}
        self.absent: dict[str, str] = {}

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
        """Returns how many kernels a call launches."""
        with self.meshes[implementation].journal() as journal:
            call()
        return journal.launches

    def compare(self, name: str, size: str, nbytes: int, calls: Mapping[str, Call]) -> None:
        """Measures candidates, and a copy that moves as many bytes, in turns."""
        self.keep(Case(name, size, nbytes, self.clock.measure(calls, nbytes)))

    def host_us(self, calls: Mapping[str, Call], number: int, **options: Any) -> dict[str, float]:
        """Returns the host's microseconds of a call, in turns; see ``host_seconds``."""
        seconds = host_seconds(calls, number, quick=self.quick, **options)
        for mesh in self.meshes.values():
            mesh.synchronize()
        return {name: taken * 1e6 for name, taken in seconds.items()}

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its floors.

    Attributes:
        doc: describes it.
        cases: runs all cases; each frees its arrays when it ends.
        floors: for a machine without GPUs.
        gpu_floors: for GPUs; None if it does not use them.
        num_devices: how many simulated devices are opened for it, if there is no GPU.
        placement: the logical devices that are opened on GPU 0, if ``num_devices`` is not 0.
        host_clock: see ``Bench``.
        implementation: of the kernels, if no devices are opened for it.
    """

    doc: str | None
    cases: Callable[[Bench], None]
    floors: Sequence[Floor]
    gpu_floors: Sequence[Floor] | None = None
    num_devices: int = 0
    placement: Sequence[int] = (0,)
    host_clock: Callable[[bool], HostClock] = HostClock
    implementation: str = "numpy"

    def floors_of(self, *, on_gpu: bool) -> Sequence[Floor]:
        """Returns the floors for a kind of machine."""
        return self.floors if self.gpu_floors is None or not on_gpu else self.gpu_floors

    def measured(self, *, quick: bool) -> Bench:
        """Runs all cases."""
        on_gpu = self.gpu_floors is not None and has_gpu()
        with ExitStack() as stack:
            meshes: dict[str, Mesh] = {}
            if self.num_devices and on_gpu:
                meshes["cuda"] = gr.open_mesh(self.placement, backend="cuda")
            elif self.num_devices:
                meshes = simulated(self.num_devices)
            for mesh in meshes.values():
                stack.enter_context(mesh)
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
            "cases": [case.as_json() for case in bench.cases.values()],
            "floors": [] if quick else kept(floors, bench.cases, bench.absent),
        }

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measures and writes the report; exits with 1 if a floor is broken."""
        options = options_of(self.doc, arguments)
        if not has_gpu():
            os.environ.setdefault("GRADREDUCE_BACKEND", "sim")  # of default meshes: no warning
        report = self.report(quick=options.quick)
        keep(report, options.json)
        broken = [one["floor"] for one in report["floors"] if one["holds"] is False]
        if broken:
            sys.exit(f"broken floors: {', '.join(broken)}")


def options_of(doc: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses ``--json FILE`` and ``--quick``, the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args(arguments)


def keep(figures: Mapping[str, Any], path: Path | None) -> None:
    """Writes figures to a file if one was given."""
    if path is not None:
        path.write_text(json.dumps(figures), encoding="utf-8")
