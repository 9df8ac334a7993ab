"""Measures all-reduce: the mean of replicas on every device, compared with a copy and peers.

On several GPUs the host's clock measures calls back to back until all queues are empty, as in
nccl-tests; the line is the time of NCCL called directly, in place, with its own communicators.
"""

import math
import statistics
import subprocess
from functools import partial
from typing import Any

import numpy as np
from gpu_check.sections import FIRST_TO_SHARE, SHARED_GPU
from gpu_check.setting import python
from measure.case import BESIDE, H100, NOT_YET, OURS, Case, Decision, Floor, counted, over, times
from measure.clock import After, Call, Calls, HostClock, Took, in_turns, timed, took_of
from measure.in_processes import figures_of
from measure.operands import Shapes, fill, integers, resnet50
from measure.peers import HIERARCHICAL, ONE_DEVICE, SUM_AND_COPIES, find_all_reduce_peers
from measure.reductions import Reduction, check, compare, placed, raw_all_reduce
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Mesh

NUM_DEVICES = 4
RESNET, TINY = "ResNet-50, MEAN", "tiny tensors"
TINY_SIZE = 16
NO_PACKS, ONE_PACK, FLAT = "num_packs=0", "num_packs=1", "flat"
WAYS = {NO_PACKS: 0, ONE_PACK: 1, FLAT: 1}  # a flat buffer is one pack
PREPARED = ", prepared"

NUM_LOGICAL = 8
KIB, MIB = 2**10, 2**20
# 1 KiB to 256 MiB; the bandwidths of several GPUs are promised from LARGE on.
SWEEP_BYTES, QUICK_BYTES = tuple(KIB * 4**step for step in range(10)), (KIB,)
LARGE = (64 * MIB, 256 * MIB)
ROUNDS, CALLS, QUICK_CALLS = 9, 20, 2
RANKS_SECONDS = 75.0

RESNET_ON_GPU, RANKS = "ResNet-50, 8 on one GPU", "2 NCCL ranks on one GPU"
RAW, IN_PLACE = "raw NCCL", "cuda, in place"
ONE, SEVERAL = (
    f"one tensor, {{}} bytes, {NUM_LOGICAL} on one GPU",
    "one tensor, {} bytes, each on a GPU",
)

OWN_ARRAYS = ", NumPy arrays"
PLAIN_CALL = Decision(
    1.5,
    "a plain call looks at 644 Buffers and makes as many results; the same step, prepared, takes "
    "1.15 of the line",
)
WRAPPING = (
    "wrapping 644 arrays and as many results takes the host 7.5 ms, because the 800 MB that a "
    "reduction moves have driven these Python objects out of the caches"
)
NEW_RESULTS = Decision(
    1.0,
    "PyTorch's sums write existing memory, a plain call makes new results; prepared, which "
    "writes existing memory too, is 1.29 times as fast, and compiled kernels 1.52 times",
)
NUMPYS = Decision(3, "almost all of it is NumPy's: with compiled kernels it is 0.2 us")
# On an AMD EPYC virtual machine with 2 cores, 2026-11, load average 0.4 to 2.9.
CPU_FLOORS = (
    *(
        Floor(f"{implementation}, {way}, over the line", RESNET,
              over("copy", f"{implementation}, {way}"), "<=", most, measured, decision=decision)
        for implementation, way, most, measured, decision in (
            ("numpy", NO_PACKS, 1.7, "1.26 to 1.41", PLAIN_CALL),
            ("numpy", ONE_PACK, 2.5, "1.62 to 1.86", None),
            ("numpy", FLAT, 1.5, "1.01 to 1.04", None),
            ("compiled", NO_PACKS, 1.1, "0.86 to 1.09", None),
            ("compiled", ONE_PACK, 2.0, "1.14 to 1.49", None),
            ("compiled", FLAT, 1.1, "0.67 to 0.91", None),
            # with num_packs=0, read where they lie
            ("numpy", NO_PACKS + OWN_ARRAYS, 1.85, BESIDE, Decision(1.5, WRAPPING)),
            ("compiled", NO_PACKS + OWN_ARRAYS, 1.3, BESIDE, Decision(1.1, WRAPPING)),
        )
    ),
    *(
        Floor(f"{implementation}, {way}, over {peer}", RESNET,
              times(peer, f"{implementation}, {way}"), ">=", least, BESIDE, (library,),
              decision)
        for implementation, least_over_torch, over_torch in (
            ("numpy", 0.85, NEW_RESULTS), ("compiled", 1.0, None),
        )
        for way, peer, library, least, decision in (
            (NO_PACKS, ONE_DEVICE, "tensorflow", 1.0, None),
            (ONE_PACK, HIERARCHICAL, "tensorflow", 1.0, None),
            (NO_PACKS, f"torch {SUM_AND_COPIES}", "torch", least_over_torch, over_torch),
        )
    ),
    *(
        Floor(f"{way}{kind}, host us for a tensor", TINY, counted(f"numpy, {way}{kind}, us"), "<=",
              most, BESIDE, decision=decision)
        for way, kind, most, decision in (  # plain calls with num_packs=0 promise nothing
            (ONE_PACK, "", 20, None),
            (NO_PACKS, PREPARED, 3.5, NUMPYS),
            (ONE_PACK, PREPARED, 3, None),
        )
    ),
)  # fmt: skip
_STUB = (
    "it was set with a driver that does nothing ({}); CuPy and a real driver take {} us for "
    "{}, and the host of the H100 is slower"
)
GPU_FLOORS = (
    Floor("co-located all-reduce, of the line", ONE.format(LARGE[-1]), times("copy", "cuda"), ">=",
          0.9, f"0.95; {H100}"),
    *(
        Floor(f"{name} step, host us {of}", RESNET_ON_GPU, counted(f"{ONE_PACK}{figure}"), "<=",
              most, f"{measured}; {H100}", decision=decision)
        for name, of, figure, most, measured, decision in (
            ("plain", "a Buffer", ", host us a Buffer", 6, "1.5", None),
            ("prepared", "of all Buffers", f"{PREPARED}, host us", 30, "20.9 and 22.5",
             Decision(20, _STUB.format("8.4", "4.6", "each of three launches"))),
            ("captured", "of all Buffers", ", captured, host us", 20, "12.4 and 13.8",
             Decision(10, _STUB.format("5.5", "1.8", "the graph"))),
        )
    ),
    Floor("NCCL, host us over a raw call", RANKS, counted("us over raw"), "<=", 10, NOT_YET),
    *(
        Floor(f"{nbytes // MIB} MiB, of raw NCCL", SEVERAL.format(nbytes),
              times(RAW, IN_PLACE), ">=", 0.97, NOT_YET)
        for nbytes in LARGE
    ),
)  # fmt: skip


def hosts(shapes: Shapes) -> list[list[np.ndarray]]:
    """Returns the replicas of each tensor, as ``placed`` makes them."""
    return [
        [integers(math.prod(shape), replica).reshape(shape) for replica in range(NUM_DEVICES)]
        for shape in shapes
    ]


def reduction(mesh: Mesh, shapes: Shapes, way: str) -> Reduction:
    """Returns the reduction of tensors in the memory that this way uses."""
    return Reduction(mesh, placed(mesh, shapes, flat=way == FLAT), WAYS[way])


def plain(mesh: Mesh, shapes: Shapes, way: str) -> Call:
    made = reduction(mesh, shapes, way)
    return made.checked(made.plain)


def of_numpy(mesh: Mesh, shapes: Shapes, way: str) -> Call:
    """Returns a call with a user's own NumPy arrays, whose times include wrapping them."""
    cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", WAYS[way], mesh=mesh)
    grads = [list(column) for column in zip(*hosts(shapes), strict=True)]
    call = partial(cross_device_ops.all_reduce, grads)
    check(zip(*call(), strict=True), grads[0])
    return call


def resnet(bench: Bench) -> None:
    shapes = resnet50(bench.quick)
    calls = find_all_reduce_peers(bench, hosts(shapes))
    for name, mesh in bench.meshes.items():
        ours = OURS + name
        for way in WAYS:
            calls[f"{ours}, {way}"] = plain(mesh, shapes, way)
        alone = reduction(mesh, shapes, NO_PACKS)
        calls[f"{ours}, {NO_PACKS}{PREPARED}"] = alone.prepared()
        for way in (NO_PACKS, ONE_PACK):
            calls[f"{ours}, {way}{OWN_ARRAYS}"] = of_numpy(mesh, shapes, way)
    compare(bench, RESNET, alone, calls)


def tiny(bench: Bench) -> None:
    tensors: Shapes = [(TINY_SIZE,)] * len(resnet50(bench.quick))
    calls: dict[str, Call] = {}
    for name, mesh in bench.meshes.items():
        for way in WAYS:
            calls[f"{name}, {way}"] = plain(mesh, tensors, way)
            calls[f"{name}, {way}{PREPARED}"] = reduction(mesh, tensors, way).prepared()
        calls[f"{name}, {ONE_PACK}{OWN_ARRAYS}"] = of_numpy(mesh, tensors, ONE_PACK)
    figures = bench.host_us(calls, bench.pick(10, 1), divisor=len(tensors))
    words = f"{len(tensors)} x {TINY_SIZE} float32 on {NUM_DEVICES} devices, us for a tensor"
    bench.note(TINY, words, figures)


def gpu_cases(bench: Bench) -> None:
    """Runs all cases; the devices of the benchmark are logical ones of one GPU."""
    for nbytes in bench.pick(SWEEP_BYTES, QUICK_BYTES):
        reduction = one_tensor(bench.meshes["cuda"], nbytes)
        calls = {f"{OURS}cuda": reduction.plain(), f"{OURS}cuda{PREPARED}": reduction.prepared()}
        compare(bench, ONE.format(nbytes), reduction, calls)
    resnet_on_gpu(bench)
    ranks(bench)
    all_gpus(bench)


def one_tensor(mesh: Mesh, nbytes: int, **options: Any) -> Reduction:
    """Returns the reduction of one tensor, after a first call."""
    reduction = Reduction(mesh, placed(mesh, [(nbytes // 4,)]), 0, **options)
    reduction.plain()()
    return reduction


def resnet_on_gpu(bench: Bench) -> None:
    mesh, shapes = bench.meshes["cuda"], resnet50(bench.quick)
    own, flat = (placed(mesh, shapes, flat=each) for each in (False, True))
    calls: dict[str, Call] = {}
    for way, num_packs in WAYS.items():
        reduction = Reduction(mesh, flat if way == FLAT else own, num_packs)
        calls[way] = reduction.plain()
        calls[f"{way}{PREPARED}"] = reduction.prepared()
        calls[f"{way}, captured"] = reduction.captured()
    figures = bench.host_us(calls, bench.pick(CALLS, QUICK_CALLS), "host us")
    # A plain call looks at every Buffer; a prepared or captured one at none.
    num_buffers = NUM_LOGICAL * len(shapes)
    for way in WAYS:
        figures[f"{way}, host us a Buffer"] = figures[f"{way}, host us"] / num_buffers
    ours = {f"{OURS}cuda, {name}": call for name, call in calls.items()}
    compare(bench, RESNET_ON_GPU, reduction, ours, figures)


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
                f"{OURS}cuda{PREPARED}": reduction.prepared(),
                OURS + IN_PLACE: reduction.plain(in_place=True),
            }
            took = back_to_back(mesh, calls, bench.pick(CALLS, QUICK_CALLS), reduction.values[0])
            words = f"{nbytes / 1e6:.3f} MB of float32"
            bench.keep(Case(SEVERAL.format(nbytes), words, 0, took))


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


def cases(bench: Bench) -> None:
    """Runs all cases: on four simulated devices with peer access, or on GPUs."""
    if bench.on_gpu:
        gpu_cases(bench)
    else:
        resnet(bench)
        tiny(bench)


BENCHMARK = Benchmark(
    __doc__, cases, CPU_FLOORS, GPU_FLOORS, num_devices=NUM_DEVICES, placement=[0] * NUM_LOGICAL,
    host_clock=partial(HostClock, copy_threads=1),
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
