"""All-reduce on GPUs: eight logical devices, two NCCL ranks on one GPU, and all GPUs.

On one GPU events on the stream of the first logical device, which launches for all, measure the
time; the line is a copy from device to device. On several GPUs the host's clock measures calls back
to back until all queues are empty, as in nccl-tests; the line is the time of NCCL called directly,
in place, with its own communicators.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gpu_check.sections import FIRST_TO_SHARE, SHARED_GPU
from gpu_check.setting import python

import gradreduce as gr
from gradreduce.device import Mesh

from .case import OURS, Case, Reduced
from .clock import Call, Took
from .floors import Decision, Floor, counted, of_the_copy, times_the_peer
from .in_processes import figures_of
from .peers import find_peers, peer_calls
from .random_values import fill, normals
from .reductions import Reduction, compare, placed
from .resnet50 import resnet50
from .runner import Bench, named

NUM_LOGICAL = 8
KIB, MIB = 2**10, 2**20
# 1 KiB to 256 MiB; the bandwidths of several GPUs are promised from LARGE on.
SWEEP_BYTES = tuple(KIB * 4**step for step in range(10))
LARGE = (64 * MIB, 256 * MIB)
QUICK_BYTES = (KIB,)
ROUNDS, CALLS, QUICK_CALLS = 9, 20, 2
RANKS_SECONDS = 75.0

RESNET, RANKS = "ResNet-50, 8 on one GPU", "2 NCCL ranks on one GPU"
WAYS = {"num_packs=0": 0, "num_packs=1": 1, "flat": 1}
RAW, IN_PLACE = "raw NCCL", "cuda, in place"
NOT_YET = "not yet measured on a GPU"
H100 = "H100, 2026-11"


def on_one(nbytes: int) -> str:
    """Returns the case name of one tensor on eight logical devices of one GPU."""
    return f"one tensor, {nbytes} bytes, {NUM_LOGICAL} on one GPU"


def on_several(nbytes: int) -> str:
    """Returns the case name of one tensor on all GPUs."""
    return f"one tensor, {nbytes} bytes, each on a GPU"


_STUB = (
    "it was set with a driver that does nothing ({}); CuPy and a real driver take {} us for "
    "{}, and the host of the H100 is slower"
)
GPU_FLOORS = (
    Floor("co-located all-reduce, of the line", on_one(LARGE[-1]), of_the_copy("cuda"), ">=", 0.9,
          f"0.95; {H100}"),
    Floor("plain step, host us a Buffer", RESNET, counted("num_packs=1, host us a Buffer"), "<=",
          6, f"1.5; {H100}"),
    Floor("prepared step, host us of all Buffers", RESNET,
          counted("num_packs=1, prepared, host us"), "<=", 30, f"20.9 and 22.5; {H100}",
          decision=Decision(20, _STUB.format("8.4", "4.6", "each of three launches"))),
    Floor("captured step, host us of all Buffers", RESNET,
          counted("num_packs=1, captured, host us"), "<=", 20, f"12.4 and 13.8; {H100}",
          decision=Decision(10, _STUB.format("5.5", "1.8", "the graph"))),
    Floor("NCCL, host us over a raw call", RANKS, counted("us over raw"), "<=", 10, NOT_YET),
    *(
        Floor(f"{nbytes // MIB} MiB, of raw NCCL", on_several(nbytes),
              times_the_peer(RAW, IN_PLACE), ">=", 0.97, NOT_YET)
        for nbytes in LARGE
    ),
)  # fmt: skip


def gpu_cases(bench: Bench) -> None:
    """Runs all cases; the devices of the benchmark are logical ones of one GPU."""
    peers = find_peers(bench)
    for nbytes in bench.pick(SWEEP_BYTES, QUICK_BYTES):
        reduction = one_tensor(bench.meshes["cuda"], nbytes)
        calls = {
            f"{OURS}cuda": reduction.plain(),
            f"{OURS}cuda, prepared": reduction.prepared(),
        }
        if nbytes == LARGE[0]:  # inputs and outs of their own: not too large
            operands = [normals(nbytes // 4)] * NUM_LOGICAL
            calls |= peer_calls(peers, "all_sum", operands, operands)
        compare(bench, on_one(nbytes), reduction, calls)
    resnet(bench)
    ranks(bench)
    all_gpus(bench)


def one_tensor(mesh: Mesh, nbytes: int, **options: Any) -> Reduction:
    """Returns the reduction of one tensor, after a first call."""
    reduction = Reduction(mesh, placed(mesh, [(nbytes // 4,)]), 0, **options)
    reduction.plain()()
    return reduction


def resnet(bench: Bench) -> None:
    """Measures GPU and host time for the gradients of a model."""
    mesh, shapes = bench.meshes["cuda"], resnet50(bench.quick)
    own, flat = (placed(mesh, shapes, flat=each) for each in (False, True))
    calls: dict[str, Call] = {}
    for way, num_packs in WAYS.items():
        reduction = Reduction(mesh, flat if way == "flat" else own, num_packs)
        calls[way] = reduction.plain()
        calls[f"{way}, prepared"] = reduction.prepared()
        calls[f"{way}, captured"] = reduction.captured()
    us = bench.host_us(calls, bench.pick(CALLS, QUICK_CALLS))
    figures = named(us, "host us")
    # A plain call looks at every Buffer; a prepared or captured one at none.
    num_buffers = NUM_LOGICAL * len(shapes)
    figures |= {f"{way}, host us a Buffer": us[way] / num_buffers for way in WAYS}
    ours = {f"{OURS}cuda, {name}": call for name, call in calls.items()}
    compare(bench, RESNET, reduction, ours, figures)


def ranks(bench: Bench) -> None:
    """Measures two NCCL ranks on one GPU, in a child process with a deadline."""
    import cupy
    from cupy.cuda import nccl

    if not nccl.available or nccl.get_version() < FIRST_TO_SHARE:
        bench.absent["ranks on one GPU"] = f"they need NCCL {FIRST_TO_SHARE} or newer"
        return
    launcher = python(fake=getattr(cupy, "FAKE", False))
    try:
        figures = figures_of("gpu_check.ranks:cost", bench.quick, 2, launcher=launcher,
                             seconds=RANKS_SECONDS, **SHARED_GPU)  # fmt: skip
    except subprocess.SubprocessError as error:
        bench.absent["ranks on one GPU"] = str(error)
        return
    bench.keep(Case(RANKS, "host us of a call", figures=figures))


# -- several GPUs ----------------------------------------------------------------------------------


def all_gpus(bench: Bench) -> None:
    """Measures NCCL with one replica per GPU, compared with direct calls of NCCL."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        bench.absent["several GPUs"] = f"there is {count}"
        return
    with gr.open_mesh(count, backend="cuda") as mesh:
        raw = RawNccl(mesh)
        for nbytes in bench.pick(SWEEP_BYTES, QUICK_BYTES):
            reduction = one_tensor(mesh, nbytes, algorithm="nccl", op=gr.ReduceOp.SUM)
            calls: dict[str, Call] = {
                RAW: partial(raw.all_reduce, raw.arguments(reduction.values[0])),
                f"{OURS}cuda": reduction.plain(),
                f"{OURS}cuda, prepared": reduction.prepared(),
                OURS + IN_PLACE: reduction.plain(in_place=True),
            }
            number = bench.pick(CALLS, QUICK_CALLS)
            took = back_to_back(mesh, calls, number, partial(refill, reduction.values[0]))
            words = f"{nbytes / 1e6:.3f} MB of float32"
            case = Reduced(on_several(nbytes), words, 0, took, {}, nbytes, len(mesh), RAW)
            bench.keep(case)


class RawNccl:
    """Direct NCCL all-reduce: a group with one call per GPU."""

    def __init__(self, mesh: Mesh) -> None:
        from cupy.cuda import nccl

        self._nccl = nccl
        self._communicators = nccl.NcclCommunicator.initAll([device.physical for device in mesh])

    def arguments(self, value: gr.PerReplica) -> list[tuple[Any, tuple[Any, ...]]]:
        """Prepares the arguments of each rank's in-place call."""
        number, add = self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM
        made = []
        for buffer in value.buffers:
            device: Any = buffer.device  # a CudaDevice
            stream = device._stream("compute").ptr
            ends = (buffer.address, buffer.address)
            made.append((device.gpu, (*ends, buffer.size, number, add, stream)))
        return made

    def all_reduce(self, ranks: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        """Runs one group."""
        self._nccl.groupStart()
        for communicator, (gpu, arguments) in zip(self._communicators, ranks, strict=True):
            with gpu:
                communicator.allReduce(*arguments)
        self._nccl.groupEnd()


def refill(value: gr.PerReplica) -> None:
    """Writes random numbers over sums that grow in place."""
    for buffer in value.buffers:
        fill(buffer)


def back_to_back(
    mesh: Mesh, calls: Mapping[str, Call], number: int, before: Call
) -> dict[str, Took]:
    """Returns the median times until the GPU is done, and until the call returns.

    ``before`` is called before each loop: sums in place would become infinite.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS if number > QUICK_CALLS else 1):
        for name, call in calls.items():
            before()
            call()
            mesh.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                call()
            host = time.perf_counter() - start
            mesh.synchronize()
            taken[name].append(((time.perf_counter() - start) / number, host / number))
    return {
        name: Took(*(statistics.median(column) for column in zip(*times, strict=True)))
        for name, times in taken.items()
    }
