"""All-reduce on GPUs: eight logical devices, two NCCL ranks on one GPU, and all GPUs.

On several GPUs the host's clock measures calls back to back until all queues are empty, as in
nccl-tests; the line is the time of NCCL called directly, in place, with its own communicators.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpu_check.sections import FIRST_TO_SHARE, SHARED_GPU
from gpu_check.setting import python

import gradreduce as gr
from gradreduce.device import Buffer, Mesh

from .case import H100, NOT_YET, OURS, Case, Decision, Floor, counted, times
from .clock import After, Call, Calls, Took, in_turns, timed, took_of
from .in_processes import figures_of
from .operands import fill, normals, resnet50
from .peers import find_peers, peer_calls
from .reductions import Reduction, compare, placed
from .runner import Bench

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
ONE, SEVERAL = (
    f"one tensor, {{}} bytes, {NUM_LOGICAL} on one GPU",
    "one tensor, {} bytes, each on a GPU",
)
_STUB = (
    "it was set with a driver that does nothing ({}); CuPy and a real driver take {} us for "
    "{}, and the host of the H100 is slower"
)
GPU_FLOORS = (
    Floor("co-located all-reduce, of the line", ONE.format(LARGE[-1]), times("copy", "cuda"), ">=",
          0.9, f"0.95; {H100}"),
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
        Floor(f"{nbytes // MIB} MiB, of raw NCCL", SEVERAL.format(nbytes),
              times(RAW, IN_PLACE), ">=", 0.97, NOT_YET)
        for nbytes in LARGE
    ),
)  # fmt: skip


def gpu_cases(bench: Bench) -> None:
    """Runs all cases; the devices of the benchmark are logical ones of one GPU."""
    peers = find_peers(bench)
    for nbytes in bench.pick(SWEEP_BYTES, QUICK_BYTES):
        reduction = one_tensor(bench.meshes["cuda"], nbytes)
        calls = {f"{OURS}cuda": reduction.plain(), f"{OURS}cuda, prepared": reduction.prepared()}
        if nbytes == LARGE[0]:  # inputs and outs of their own: not too large
            operands = [normals(nbytes // 4)] * NUM_LOGICAL
            calls |= peer_calls(peers, "all_sum", operands, operands)
        compare(bench, ONE.format(nbytes), reduction, calls)
    resnet(bench)
    ranks(bench)
    all_gpus(bench)


def one_tensor(mesh: Mesh, nbytes: int, **options: Any) -> Reduction:
    """Returns the reduction of one tensor, after a first call."""
    reduction = Reduction(mesh, placed(mesh, [(nbytes // 4,)]), 0, **options)
    reduction.plain()()
    return reduction


def resnet(bench: Bench) -> None:
    mesh, shapes = bench.meshes["cuda"], resnet50(bench.quick)
    own, flat = (placed(mesh, shapes, flat=each) for each in (False, True))
    calls: dict[str, Call] = {}
    for way, num_packs in WAYS.items():
        reduction = Reduction(mesh, flat if way == "flat" else own, num_packs)
        calls[way] = reduction.plain()
        calls[f"{way}, prepared"] = reduction.prepared()
        calls[f"{way}, captured"] = reduction.captured()
    figures = bench.host_us(calls, bench.pick(CALLS, QUICK_CALLS), "host us")
    # A plain call looks at every Buffer; a prepared or captured one at none.
    num_buffers = NUM_LOGICAL * len(shapes)
    for way in WAYS:
        figures[f"{way}, host us a Buffer"] = figures[f"{way}, host us"] / num_buffers
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
        bench.note(RANKS, "host us of a call", figures)
    except subprocess.SubprocessError as error:
        bench.absent["ranks on one GPU"] = str(error)


def all_gpus(bench: Bench) -> None:
    """Measures NCCL with one replica per GPU, compared with direct calls of NCCL."""
    import cupy
    from cupy.cuda import nccl

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        bench.absent["several GPUs"] = f"there is {count}"
        return
    with gr.open_mesh(count, backend="cuda") as mesh:
        communicators = nccl.NcclCommunicator.initAll([device.physical for device in mesh])
        for nbytes in bench.pick(SWEEP_BYTES, QUICK_BYTES):
            reduction = one_tensor(mesh, nbytes, algorithm="nccl", op=gr.ReduceOp.SUM)
            calls: dict[str, Call] = {
                RAW: raw_all_reduce(communicators, reduction.values[0].buffers),
                f"{OURS}cuda": reduction.plain(),
                f"{OURS}cuda, prepared": reduction.prepared(),
                OURS + IN_PLACE: reduction.plain(in_place=True),
            }
            took = back_to_back(mesh, calls, bench.pick(CALLS, QUICK_CALLS), reduction.values[0])
            words = f"{nbytes / 1e6:.3f} MB of float32"
            bench.keep(Case(SEVERAL.format(nbytes), words, 0, took))


def raw_all_reduce(communicators: Sequence[Any], buffers: Sequence[Buffer]) -> Call:
    """Returns NCCL's own all-reduce of float32 in place: a group with one call per rank."""
    from cupy.cuda import nccl

    ranks: list[tuple[Any, Any, tuple[Any, ...]]] = []
    for communicator, buffer in zip(communicators, buffers, strict=True):
        device: Any = buffer.device  # a CudaDevice
        given = (buffer.address, buffer.address, buffer.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM)
        stream = device._stream("compute").ptr
        ranks.append((communicator, device.gpu, (*given, stream)))

    def call() -> None:
        nccl.groupStart()
        for communicator, gpu, arguments in ranks:
            with gpu:
                communicator.allReduce(*arguments)
        nccl.groupEnd()

    return call


def back_to_back(mesh: Mesh, calls: Calls, number: int, value: gr.PerReplica) -> dict[str, Took]:
    """Returns the median times of calls in a row, until the GPUs are done.

    Writes random numbers before each loop: sums in place would become infinite.
    """

    def before() -> None:
        for buffer in value.buffers:
            fill(buffer)
        mesh.synchronize()

    def loop(call: Call) -> None:
        for _ in range(number):
            call()
        mesh.synchronize()

    turns = [timed(name, After(before, partial(loop, call))) for name, call in calls.items()]
    taken = in_turns(turns, ROUNDS if number > QUICK_CALLS else 1)
    return took_of({name: statistics.median(each) / number for name, each in taken.items()})
