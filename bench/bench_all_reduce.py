"""Measures all-reduce: the mean of replicas on every device, compared with a copy and peers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from measure.all_reduce_gpu import GPU_FLOORS, NUM_LOGICAL, gpu_cases
from measure.case import BESIDE, OURS, Decision, Floor, counted, over, times
from measure.clock import Call, HostClock
from measure.operands import Shapes, integers, resnet50
from measure.peers import HIERARCHICAL, ONE_DEVICE, SUM_AND_COPIES, find_all_reduce_peers
from measure.reductions import Reduction, check, compare, placed
from measure.runner import Bench, Benchmark

import gradreduce as gr
from gradreduce.device import Mesh

NUM_DEVICES = 4
RESNET, TINY = "ResNet-50, MEAN", "tiny tensors"
TINY_SIZE = 16
NO_PACKS, ONE_PACK, FLAT = "num_packs=0", "num_packs=1", "flat"
WAYS = {NO_PACKS: 0, ONE_PACK: 1, FLAT: 1}  # a flat buffer is one pack
PREPARED = ", prepared"

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
        )
    ),
    *(  # with num_packs=0, read where they lie
        Floor(f"{implementation}, {NO_PACKS}{OWN_ARRAYS}, over the line", RESNET,
              over("copy", f"{implementation}, {NO_PACKS}{OWN_ARRAYS}"), "<=", most, BESIDE,
              decision=Decision(was, WRAPPING))
        for implementation, most, was in (("numpy", 1.85, 1.5), ("compiled", 1.3, 1.1))
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
            (NO_PACKS, SUM_AND_COPIES, "torch", least_over_torch, over_torch),
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
