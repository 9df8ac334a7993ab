"""Measures all-reduce over two processes of this machine, compared with their library's own.

Starts two processes by torchrun (gloo), and two by mpiexec, where PyTorch and mpi4py are installed.
Each process has one simulated device. The line is one raw all-reduce of that library, with as many
bytes, in the same rounds. The cases are ResNet-50's gradients in a flat buffer, prepared; the same
gradients packed, beside NumPy's copy of them into one array; and 161 tiny tensors, prepared and
plain. Exit status 1 if a floor is violated.

    python bench/bench_processes.py [--json FILE] [--quick]
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure.case import OURS, Case
from measure.clock import Call, Took
from measure.floors import Floor, counted, over_the_peer
from measure.report import finish, options_of, report_of
from measure.resnet50 import resnet50

import gradreduce as gr
from gradreduce.backends import Launcher
from gradreduce.device import Mesh

SIZE = 2  # processes
LAUNCHERS = {"torchrun": "torch", "mpi": "mpi4py"}  # and the library that sends
RAW, FLAT, PACKED, PLAIN, ALONE = "raw all-reduce", "flat", "packed", "plain", "one process"
PREPARED = ", prepared"
TINY_SIZE = 16
ROUNDS, TINY_ROUNDS, QUICK_ROUNDS, WARM_UPS = 25, 1000, 2, 3
QUICK_SIZE, QUICK_TENSORS = 2**7, 12
SECONDS = 600.0  # for all rounds of one launcher
OVER_RAW, PLAIN_OVER = "prepared, us over raw", "plain, us over raw and one process"
PASS, OVER_PASS = "one pack pass", "packed, prepared, over raw and one pack pass"


def resnet_of(launcher: str) -> str:
    """Returns the case name of a model's gradients."""
    return f"ResNet-50, {SIZE} processes, {launcher}"


def tiny_of(launcher: str) -> str:
    """Returns the case name of tiny tensors."""
    return f"tiny tensors, {SIZE} processes, {launcher}"


# On an AMD EPYC virtual machine with 2 cores that others kept busy, 2026-11, load average 4 to 9.
MEASURED = {
    ("torchrun", FLAT): "0.99 to 1.09", ("torchrun", PACKED): "0.94",
    ("torchrun", OVER_RAW): "34 to 101", ("torchrun", PLAIN_OVER): "19 to 131",
    ("mpi", FLAT): "0.30 to 0.41", ("mpi", PACKED): "0.32",
    ("mpi", OVER_RAW): "56 to 78", ("mpi", PLAIN_OVER): "57 to 80",
}  # fmt: skip
FLOORS = tuple(
    floor
    for launcher, library in LAUNCHERS.items()
    for floor in (
        Floor(f"{launcher}, flat, prepared, over raw", resnet_of(launcher),
              over_the_peer(RAW, FLAT + PREPARED), "<=", 1.1,
              MEASURED[launcher, FLAT], (library,)),
        Floor(f"{launcher}, {OVER_PASS}", resnet_of(launcher), counted(OVER_PASS), "<=", 1.1,
              MEASURED[launcher, PACKED], (library,)),
        Floor(f"{launcher}, tiny tensors, {OVER_RAW}", tiny_of(launcher), counted(OVER_RAW), "<=",
              200, MEASURED[launcher, OVER_RAW], (library,)),
        Floor(f"{launcher}, tiny tensors, {PLAIN_OVER}", tiny_of(launcher), counted(PLAIN_OVER),
              "<=", 100, MEASURED[launcher, PLAIN_OVER], (library,)),
    )
)  # fmt: skip


# -- in each process -------------------------------------------------------------------------------


def raw_calls(launcher: str, size: int) -> tuple[Call, Call]:
    """Returns the library's barrier, and its all-reduce of so many float32."""
    values = np.ones(size, np.float32)
    if launcher == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        return world.Barrier, partial(world.Allreduce, MPI.IN_PLACE, values)
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(values)
    return dist.barrier, partial(dist.all_reduce, tensor)


def calls_of(mesh: Mesh, shapes: Sequence[tuple[int, ...]], name: str) -> dict[str, Call]:
    """Returns prepared and plain calls that sum tensors of these shapes."""
    if name == FLAT:
        views = list(mesh.flat_buffer(shapes, "float32").views[0])
    else:
        views = [mesh[0].zeros(shape, "float32") for shape in shapes]
    for view in views:
        mesh[0].upload(np.ones(view.shape, np.float32), out=view)
    values = [gr.PerReplica([view], mesh) for view in views]
    pairs = [(value, value) for value in values]
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", 1, mesh=mesh)
    call = partial(cross_device_ops.batch_reduce, gr.ReduceOp.MEAN, pairs)
    for mean in call():
        if not (mean.values[0].numpy() == 1).all():
            raise AssertionError(f"{name}: a result is not the mean")
    prepared = cross_device_ops.prepare(gr.ReduceOp.MEAN, pairs)
    return {f"{OURS}{name}{PREPARED}": prepared, f"{OURS}{name}, {PLAIN}": call}


def pack_pass(shapes: Sequence[tuple[int, ...]]) -> Call:
    """Returns NumPy's copy of tensors of these shapes into one array."""
    tensors = [np.ones(math.prod(shape), np.float32) for shape in shapes]
    packed = np.empty(sum(tensor.size for tensor in tensors), np.float32)
    return partial(np.concatenate, tensors, out=packed)


def in_turns(calls: Mapping[str, Call], barrier: Call, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call, in turns; all processes begin a call together."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UPS + rounds):
        for name, call in calls.items():
            barrier()
            start = time.perf_counter()
            call()
            if turn >= WARM_UPS:
                taken[name].append(time.perf_counter() - start)
    return taken


def run_process(launcher: Launcher, report: Path, *, quick: bool) -> None:
    """Measures in one of the processes; the first writes the seconds of each case."""
    mesh = gr.open_mesh(1, backend="sim", processes=launcher)
    alone = gr.open_mesh(1, backend="sim", processes="none")
    shapes = resnet50()
    if quick:
        shapes = [(min(math.prod(shape), QUICK_SIZE),) for shape in shapes[:QUICK_TENSORS]]
    found = {}
    for case, each, names in (
        (resnet_of(launcher), shapes, (FLAT, PACKED)),
        (tiny_of(launcher), [(TINY_SIZE,)] * len(shapes), (PACKED,)),
    ):
        barrier, raw = raw_calls(launcher, sum(math.prod(shape) for shape in each))
        calls = {RAW: raw}
        for name in names:
            calls |= calls_of(mesh, each, name)
        is_tiny = each is not shapes
        if is_tiny:
            name = f"{OURS}{ALONE}, {PLAIN}"
            calls[name] = calls_of(alone, each, ALONE)[name]
        else:
            calls[PASS] = pack_pass(each)
        rounds = QUICK_ROUNDS if quick else TINY_ROUNDS if is_tiny else ROUNDS
        taken = in_turns(calls, barrier, rounds)
        # For tiny tensors the best round: other work on the machine doubles microseconds.
        of_rounds = min if is_tiny else statistics.median
        found[case] = {name: of_rounds(times) for name, times in taken.items()}
    if mesh.process_index == 0:
        report.write_text(json.dumps(found), encoding="utf-8")
    mesh.close()


# -- the run ---------------------------------------------------------------------------------------


class Bench:
    """Starts the processes of each launcher that is installed."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.absent: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def run(self) -> None:
        """Runs all launchers."""
        for launcher, library in LAUNCHERS.items():
            if importlib.util.find_spec(library) is None:
                self.absent[library] = "not installed"
                continue
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "seconds.json"
                command = [*command_of(launcher), __file__, launcher, str(report)]
                command += ["--quick"] * self.quick
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                environment.pop("PRTE_MCA_rmaps_default_mapping_policy", None)  # a core for each
                subprocess.run(command, env=environment, timeout=SECONDS, check=True)
                for name, seconds in json.loads(report.read_text(encoding="utf-8")).items():
                    self.keep(name, seconds)

    def keep(self, name: str, seconds: Mapping[str, float]) -> None:
        """Prints and stores a case."""
        figures = {}
        prepared, plain = (f"{OURS}{PACKED}{PREPARED}", f"{OURS}{PACKED}, {PLAIN}")
        alone = seconds.get(f"{OURS}{ALONE}, {PLAIN}")
        if PASS in seconds:
            figures[OVER_PASS] = seconds[prepared] / (seconds[RAW] + seconds[PASS])
        if alone is not None:
            figures[OVER_RAW] = (seconds[prepared] - seconds[RAW]) * 1e6
            figures[PLAIN_OVER] = (seconds[plain] - seconds[RAW] - alone) * 1e6
        took = {candidate: Took(each, each) for candidate, each in seconds.items()}
        self.cases[name] = Case(name, f"{SIZE} processes, float32", 0, took, figures)
        self.cases[name].show()


def command_of(launcher: str) -> list[str]:
    """Returns the command that starts Python in the processes."""
    if launcher == "mpi":
        beside = Path(sys.executable).with_name("mpiexec")
        mpiexec = str(beside) if beside.exists() else "mpiexec"
        return [mpiexec, "-n", str(SIZE), sys.executable]
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    return [sys.executable, *module]


def measured(*, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    print(f"{SIZE} processes; load average {load:.2f}")
    bench = Bench(quick=quick)
    bench.run()
    return report_of(["numpy"], load, bench, FLOORS, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    given: list[Any] = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] and given[0] in LAUNCHERS:  # one of the processes that this script starts
        run_process(given[0], Path(given[1]), quick="--quick" in given)
        return
    options = options_of(__doc__, arguments)
    finish(measured(quick=options.quick), options.json)


if __name__ == "__main__":
    main()
