"""Measures all-reduce: the mean of replicas on every device, compared with a copy and peers.

On GPUs if CuPy finds any, otherwise on four simulated devices with both implementations. For each
candidate the table gives size, time, algorithm and bus bandwidth (as nccl-tests define them), the
ratio to the *line*, and the host's time of a call. The line is the time of a plain copy, in the
same rounds, that reads each replica once and writes each result once, as an all-reduce must. On a
CPU the copy is np.copyto, in one thread. Reports peers that are not installed. Exit status 1 if a
floor is violated.

    python bench/bench_all_reduce.py [--json FILE] [--quick]
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from measure.all_reduce_gpu import GPU_DECISIONS, GPU_FLOORS, GpuBench
from measure.all_reduce_peers import (
    HIERARCHICAL,
    ONE_DEVICE,
    SUM_AND_COPIES,
    find_all_reduce_peers,
)
from measure.case import OURS, Case
from measure.clock import Call, HostClock, host_seconds
from measure.floors import Decision, Floor, counted, over_the_copy, times_the_peer
from measure.reduced import Reduced
from measure.report import finish, options_of, report_of
from measure.resnet50 import resnet50
from measure.setting import has_gpu

import gradreduce as gr
from gradreduce.backends import Kernels
from gradreduce.device import Device, Mesh

NUM_DEVICES = 4
IMPLEMENTATIONS: tuple[Kernels, ...] = ("numpy", "compiled")
RESNET, TINY, ONE = "ResNet-50, MEAN", "tiny tensors", "one tensor"
TINY_SIZE = 16
NO_PACKS, ONE_PACK, FLAT = "num_packs=0", "num_packs=1", "flat"
WAYS = (NO_PACKS, ONE_PACK, FLAT)
PREPARED = ", prepared"
SWEEP_BYTES = tuple(2**power for power in range(10, 27, 4))  # of one tensor: 1 KiB to 64 MiB
QUICK_SIZE, QUICK_TENSORS, QUICK_SWEEP_BYTES = 2**7, 12, (2**10,)

MEASURED = {  # on an AMD EPYC virtual machine with 2 cores, 2026-11, load average 0.4 to 2.9
    ("numpy", "num_packs=0"): "1.26 to 1.41", ("numpy", "num_packs=1"): "1.62 to 1.86",
    ("numpy", "flat"): "1.01 to 1.04", ("compiled", "num_packs=0"): "0.86 to 1.09",
    ("compiled", "num_packs=1"): "1.14 to 1.49", ("compiled", "flat"): "0.67 to 0.91",
}  # fmt: skip
BESIDE = "docs/benchmarks.md, 2026-11"
MOST = {
    "numpy": (1.7, 2.5, 1.5),
    "compiled": (1.1, 2.0, 1.1),
}  # times the line, in the order of WAYS
OWN_ARRAYS = ", NumPy arrays"
MOST_OWN_ARRAYS = {"numpy": 1.85, "compiled": 1.3}  # with num_packs=0, read where they lie
MOST_PLAIN_US, MOST_PREPARED_US, MOST_PREPARED_ALONE_US = 20, 3, 3.5
LEAST_OVER_TORCH = {"numpy": 0.85, "compiled": 1.0}
CPU_FLOORS = (
    *(
        Floor(f"{implementation}, {way}, over the line", RESNET,
              over_the_copy(f"{implementation}, {way}"), "<=", most, MEASURED[implementation, way])
        for implementation in IMPLEMENTATIONS
        for way, most in zip(WAYS, MOST[implementation], strict=True)
    ),
    *(
        Floor(f"{implementation}, {NO_PACKS}{OWN_ARRAYS}, over the line", RESNET,
              over_the_copy(f"{implementation}, {NO_PACKS}{OWN_ARRAYS}"), "<=", most, BESIDE)
        for implementation, most in MOST_OWN_ARRAYS.items()
    ),
    *(
        Floor(f"{implementation}, {way}, over {peer}", RESNET, times_the_peer(peer,
        f"{implementation}, {way}"), ">=",
              LEAST_OVER_TORCH[implementation] if library == "torch" else 1.0, BESIDE, (library,))
        for implementation in IMPLEMENTATIONS
        for way, peer, library in (
            (NO_PACKS, ONE_DEVICE, "tensorflow"),
            (ONE_PACK, HIERARCHICAL, "tensorflow"),
            (NO_PACKS, SUM_AND_COPIES, "torch"),
        )
    ),
    *(
        Floor(f"{way}{kind}, host us for a tensor", TINY, counted(f"numpy, {way}{kind}, us"), "<=",
              most, BESIDE)
        for way, kind, most in (  # with num_packs=0 plain calls are shown and promise nothing
            (ONE_PACK, "", MOST_PLAIN_US),
            (NO_PACKS, PREPARED, MOST_PREPARED_ALONE_US),
            (ONE_PACK, PREPARED, MOST_PREPARED_US),
        )
    ),
)  # fmt: skip
PLAIN_CALL = (
    "a plain call looks at 644 Buffers and makes as many results; the same step, prepared, takes "
    "1.15 of the line"
)
WRAPPING = (
    "wrapping 644 arrays and as many results takes the host 7.5 ms, because the 800 MB that a "
    "reduction moves have driven these Python objects out of the caches"
)
DECISIONS = {
    **GPU_DECISIONS,
    f"numpy, {NO_PACKS}, over the line": Decision(1.5, PLAIN_CALL),
    **{
        f"{each}, {NO_PACKS}{OWN_ARRAYS}, over the line": Decision(was, WRAPPING)
        for each, was in (("numpy", 1.5), ("compiled", 1.1))
    },
    f"numpy, {NO_PACKS}, over {SUM_AND_COPIES}": Decision(
        1.0,
        "PyTorch's sums write existing memory, a plain call makes new results; prepared, which "
        "writes existing memory too, is 1.29 times as fast, and compiled kernels 1.52 times",
    ),
    f"{NO_PACKS}{PREPARED}, host us for a tensor": Decision(
        3, "almost all of it is NumPy's: with compiled kernels it is 0.2 us"
    ),
}

Tensors = list[list[np.ndarray]]  # [tensor][replica]


def hosts(shapes: Sequence[tuple[int, ...]]) -> Tensors:
    """Returns replicas of small integers, whose sums and means are exact."""
    random = np.random.default_rng(0)
    pattern = random.integers(-64, 64, 2**16 + 1).astype(np.float32)
    made = []
    for place, shape in enumerate(shapes):
        size = math.prod(shape)
        turned = [np.roll(pattern, 7 * place + 11 * index) for index in range(NUM_DEVICES)]
        made.append([np.resize(each, size).reshape(shape) for each in turned])
    return made


def check(name: str, results: Sequence[Sequence[np.ndarray]], tensors: Tensors) -> None:
    """Raises if a result on a device is not the mean of its replicas."""
    for place, (replicas, found) in enumerate(zip(tensors, results, strict=True)):
        wanted = sum(replicas[1:], replicas[0]) / np.float32(len(replicas))
        for index, result in enumerate(found):
            if not np.array_equal(result, wanted):
                raise AssertionError(f"{name}: tensor {place} on device {index} is not the mean")


class Steps:
    """The all-reduces of one implementation over the same tensors, in every way.

    With ``num_packs=0`` a launch reads the gradients where they are. The gradients of ``plain`` are
    uploaded first, like results of our operations. A user's own NumPy arrays have separate rows,
    whose times include wrapping 644 arrays and their results.
    """

    def __init__(self, implementation: str, mesh: Mesh, tensors: Tensors) -> None:
        self.implementation = implementation
        self.mesh = mesh
        self.tensors = tensors

    def pairs(self, way: str) -> list[tuple[Any, Any]]:
        """Returns the inputs, in the memory that this way uses."""
        if way == FLAT:
            shapes = [replicas[0].shape for replicas in self.tensors]
            views = self.mesh.flat_buffer(shapes, "float32").views
            for index, device in enumerate(self.mesh):
                for view, replicas in zip(views[index], self.tensors, strict=True):
                    device.upload(replicas[index], out=view)
            placed = [list(column) for column in zip(*views, strict=True)]
        else:
            placed = [list(map(Device.upload, self.mesh, replicas)) for replicas in self.tensors]
        return [(value, value) for value in (gr.PerReplica(each, self.mesh) for each in placed)]

    def cross_device_ops(self, way: str) -> gr.AllReduceCrossDeviceOps:
        """Returns the ``CrossDeviceOps`` of a way; a flat buffer is one pack."""
        num_packs = 0 if way == NO_PACKS else 1
        return gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=self.mesh)

    def plain(self, way: str) -> Call:
        """Returns a plain ``batch_reduce`` call of Buffers."""
        call = partial(self.cross_device_ops(way).batch_reduce, gr.ReduceOp.MEAN, self.pairs(way))
        results = [value.values for value in call()]
        check(f"{self.implementation}, {way}", [[each.numpy() for each in row] for row in results],
              self.tensors)  # fmt: skip
        return call

    def prepared(self, way: str) -> Call:
        """Returns a prepared step of Buffers."""
        return self.cross_device_ops(way).prepare(gr.ReduceOp.MEAN, self.pairs(way))

    def of_numpy(self, way: str) -> Call:
        """Returns a call with NumPy inputs and outputs."""
        grads = [list(column) for column in zip(*self.tensors, strict=True)]
        call = partial(self.cross_device_ops(way).all_reduce, grads)
        check(f"{self.implementation}, {way}, NumPy", list(zip(*call(), strict=True)), self.tensors)
        return call


class CpuBench:
    """Four simulated physical devices with peer access to each other."""

    def __init__(self, meshes: dict[str, Mesh], *, quick: bool) -> None:
        self.meshes = meshes
        self.quick = quick
        self.clock = HostClock(quick, copy_threads=1)
        self.absent: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def run(self) -> None:
        """Runs all cases; each frees its arrays when it ends."""
        self.resnet()
        self.tiny()
        for nbytes in QUICK_SWEEP_BYTES if self.quick else SWEEP_BYTES:
            self.one(nbytes)

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    def steps(self, tensors: Tensors) -> Iterator[Steps]:
        """Returns the candidates of each implementation."""
        for implementation, mesh in self.meshes.items():
            yield Steps(implementation, mesh, tensors)

    def reduced(self, name: str, tensors: Tensors, calls: dict[str, Call]) -> None:
        """Measures candidates and a copy as the baseline, in turns."""
        nbytes = sum(replicas[0].nbytes for replicas in tensors)
        moved = 2 * NUM_DEVICES * nbytes
        took = self.clock.measure(calls, moved)
        words = f"{len(tensors)} tensors, {nbytes / 1e6:.2f} MB of float32"
        self.keep(Reduced(name, words, moved, took, {}, nbytes, NUM_DEVICES))

    def resnet(self) -> None:
        """Reduces the gradients of a model."""
        shapes = resnet50()
        if self.quick:
            shapes = [(min(math.prod(shape), QUICK_SIZE),) for shape in shapes[:QUICK_TENSORS]]
        tensors = hosts(shapes)
        calls, self.absent = find_all_reduce_peers(tensors)
        for steps in self.steps(tensors):
            implementation = OURS + steps.implementation
            for way in WAYS:
                calls[f"{implementation}, {way}"] = steps.plain(way)
            calls[f"{implementation}, {NO_PACKS}{PREPARED}"] = steps.prepared(NO_PACKS)
            for way in (NO_PACKS, ONE_PACK):
                calls[f"{implementation}, {way}{OWN_ARRAYS}"] = steps.of_numpy(way)
        self.reduced(RESNET, tensors, calls)

    def tiny(self) -> None:
        """Measures the host time per tensor with tiny tensors."""
        tensors = hosts([(TINY_SIZE,)] * (QUICK_TENSORS if self.quick else len(resnet50())))
        calls: dict[str, Call] = {}
        for steps in self.steps(tensors):
            for way in WAYS:
                calls[f"{steps.implementation}, {way}"] = steps.plain(way)
                calls[f"{steps.implementation}, {way}{PREPARED}"] = steps.prepared(way)
            calls[f"{steps.implementation}, {ONE_PACK}{OWN_ARRAYS}"] = steps.of_numpy(ONE_PACK)
        seconds = host_seconds(calls, 1 if self.quick else 10, quick=self.quick)
        figures = {f"{name}, us": taken / len(tensors) * 1e6 for name, taken in seconds.items()}
        words = f"{len(tensors)} x {TINY_SIZE} float32 on {NUM_DEVICES} devices, us for a tensor"
        self.keep(Case(TINY, words, figures=figures))

    def one(self, nbytes: int) -> None:
        """Reduces one tensor, from sizes bound by the call to sizes bound by memory."""
        tensors = hosts([(nbytes // 4,)])
        calls: dict[str, Call] = {}
        for steps in self.steps(tensors):
            calls[f"{OURS}{steps.implementation}, {NO_PACKS}"] = steps.plain(NO_PACKS)
            calls[f"{OURS}{steps.implementation}, {NO_PACKS}{PREPARED}"] = steps.prepared(NO_PACKS)
        self.reduced(f"{ONE}, {nbytes} bytes", tensors, calls)


# -- the run ---------------------------------------------------------------------------------------


def on_cpu(*, quick: bool) -> CpuBench:
    """Runs the cases on simulated devices with both implementations."""
    with ExitStack() as stack:
        meshes: dict[str, Mesh] = {
            implementation: stack.enter_context(
                gr.open_mesh(NUM_DEVICES, backend="sim", kernels=implementation, strict=False)
            )
            for implementation in IMPLEMENTATIONS
        }
        bench = CpuBench(meshes, quick=quick)
        bench.run()
    return bench


def on_gpu(*, quick: bool) -> GpuBench:
    """Runs the cases on one GPU as eight logical devices, and on all GPUs."""
    bench = GpuBench(quick=quick)
    bench.run()
    return bench


def measured(*, quick: bool) -> dict[str, Any]:
    """Runs all cases and returns a report for JSON."""
    load = os.getloadavg()[0]
    gpu = has_gpu()
    print(f"{'cuda' if gpu else ', '.join(IMPLEMENTATIONS)}; load average {load:.2f}")
    bench = on_gpu(quick=quick) if gpu else on_cpu(quick=quick)
    floors = GPU_FLOORS if gpu else CPU_FLOORS
    return report_of(["cuda"] if gpu else IMPLEMENTATIONS, load, bench, floors, quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    finish(measured(quick=options.quick), options.json)


if __name__ == "__main__":
    main()
