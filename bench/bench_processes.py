"""Measures all-reduce over two processes of this machine, compared with their library's own."""

import math
import os
import statistics
import sys
from functools import partial
from pathlib import Path

import numpy as np
from measure.case import OURS, Floor, counted, over
from measure.clock import After, Call, Calls, each, in_turns, timed
from measure.in_processes import figures_of, torchrun
from measure.operands import Shapes, resnet50
from measure.reductions import Reduction, placed
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce.backends import Launcher
from gradreduce.device import Mesh

SIZE = 2  # processes
LAUNCHERS = {"torchrun": "torch", "mpi": "mpi4py"}  # and the library that sends
RAW, FLAT, PACKED, PLAIN, ALONE = "raw all-reduce", "flat", "packed", "plain", "one process"
PREPARED = ", prepared"
RESNET, TINY = f"ResNet-50, {SIZE} processes, {{}}", f"tiny tensors, {SIZE} processes, {{}}"
TINY_SIZE = 16
ROUNDS, TINY_ROUNDS, QUICK_ROUNDS, WARM_UPS = 25, 1000, 2, 3
SECONDS = 600.0  # for all rounds of one launcher
OVER_RAW, PLAIN_OVER = "prepared, us over raw", "plain, us over raw and one process"
PASS, OVER_PASS = "one pack pass", "packed, prepared, over raw and one pack pass"

# On an AMD EPYC virtual machine with 2 cores that others kept busy, 2026-11, load average 4 to 9.
FLOORS = tuple(
    Floor(f"{launcher}, {name}", case.format(launcher), figure, "<=", most, measured,
          (LAUNCHERS[launcher],))
    for launcher, *found in (
        ("torchrun", "0.99 to 1.09", "0.94", "34 to 101", "19 to 131"),
        ("mpi", "0.30 to 0.41", "0.32", "56 to 78", "57 to 80"),
    )
    for (name, case, figure, most), measured in zip((
        ("flat, prepared, over raw", RESNET, over(RAW, FLAT + PREPARED), 1.1),
        (OVER_PASS, RESNET, counted(OVER_PASS), 1.1),
        (f"tiny tensors, {OVER_RAW}", TINY, counted(OVER_RAW), 200),
        (f"tiny tensors, {PLAIN_OVER}", TINY, counted(PLAIN_OVER), 100),
    ), found, strict=True)
)  # fmt: skip


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


def calls_of(mesh: Mesh, shapes: Shapes, name: str) -> dict[str, Call]:
    """Returns prepared and plain calls that sum tensors of these shapes."""
    reduction = Reduction(mesh, placed(mesh, shapes, flat=name == FLAT))
    call = reduction.checked(reduction.plain)  # all processes have the same tensors
    return {f"{OURS}{name}{PREPARED}": reduction.prepared(), f"{OURS}{name}, {PLAIN}": call}


def in_each(launcher: Launcher, quick: bool) -> dict[str, dict[str, float]] | None:
    """Measures in one of the processes; the first returns the seconds of each case."""
    shapes = resnet50(quick)
    tiny = [(TINY_SIZE,)] * len(shapes)
    with gr.open_mesh(1, backend="sim", processes=launcher) as mesh:
        calls = {**calls_of(mesh, shapes, FLAT), **calls_of(mesh, shapes, PACKED)}
        tensors = [np.ones(math.prod(shape), np.float32) for shape in shapes]
        packed = np.empty(sum(tensor.size for tensor in tensors), np.float32)
        calls[PASS] = partial(np.concatenate, tensors, out=packed)
        taken = turns(launcher, shapes, calls, QUICK_ROUNDS if quick else ROUNDS)
        found = {RESNET.format(launcher): each(statistics.median, taken)}
        with gr.open_mesh(1, backend="sim", processes="none") as alone:
            name = f"{OURS}{ALONE}, {PLAIN}"
            calls = {**calls_of(mesh, tiny, PACKED), name: calls_of(alone, tiny, ALONE)[name]}
            taken = turns(launcher, tiny, calls, QUICK_ROUNDS if quick else TINY_ROUNDS)
        # The best round, because other work on the machine doubles microseconds.
        found[TINY.format(launcher)] = each(min, taken)
        return found if mesh.process_index == 0 else None


def turns(launcher: str, shapes: Shapes, calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call and of the raw one; all processes begin a call together."""
    barrier, raw = raw_calls(launcher, sum(map(math.prod, shapes)))
    candidates = {RAW: raw, **calls}
    measured = [timed(name, After(barrier, call)) for name, call in candidates.items()]
    return in_turns(measured, rounds, warm_ups=WARM_UPS)


def cases(bench: Bench) -> None:
    """Runs all launchers that are installed, and adds the figures that the floors need."""
    os.environ.pop("PRTE_MCA_rmaps_default_mapping_policy", None)  # a core for each
    prepared, plain = f"{OURS}{PACKED}{PREPARED}", f"{OURS}{PACKED}, {PLAIN}"
    for launcher, library in LAUNCHERS.items():
        if not bench.has(library):
            continue
        beside = Path(sys.executable).with_name("mpiexec")
        by_mpi = [str(beside if beside.exists() else "mpiexec"), "-n", str(SIZE), sys.executable]
        found = figures_of(
            "bench_processes:in_each", launcher, bench.quick,
            launcher=by_mpi if launcher == "mpi" else torchrun(SIZE),
            seconds=SECONDS, OMP_NUM_THREADS="1",
        )  # fmt: skip
        for name, took in found.items():
            if PASS in took:
                figures = {OVER_PASS: took[prepared] / (took[RAW] + took[PASS])}
            else:
                alone = took[f"{OURS}{ALONE}, {PLAIN}"]
                figures = {
                    OVER_RAW: (took[prepared] - took[RAW]) * 1e6,
                    PLAIN_OVER: (took[plain] - took[RAW] - alone) * 1e6,
                }
            bench.note(name, f"{SIZE} processes, float32", figures, took)


BENCHMARK = Benchmark(__doc__, cases, FLOORS)

if __name__ == "__main__":
    BENCHMARK.main()
