"""All-reduce on GPUs: eight logical devices, two NCCL ranks on one GPU, and all GPUs.

On one GPU events on the stream of the first logical device, which launches for all, measure the
time; the line is a copy from device to device. On several GPUs the host's clock measures calls back
to back until all queues are empty, as in nccl-tests; the line is the time of NCCL called directly,
in place, with its own communicators.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_check.run_nccl import FIRST_TO_SHARE, SHARED_GPU
from gpu_check.setting import python

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.device import Mesh

from .case import OURS, Case
from .clock import Call, Clock, Took, clock_of, host_seconds
from .floors import Decision, Floor, counted, of_the_copy, times_the_peer
from .peers import find_peers
from .random_values import fill, normals
from .reduced import Reduced
from .resnet50 import resnet50

__all__ = ["GPU_DECISIONS", "GPU_FLOORS", "GpuBench"]

NUM_LOGICAL = 8
KIB, MIB = 2**10, 2**20
# 1 KiB to 256 MiB; the bandwidths of several GPUs are promised from LARGE on.
SWEEP_BYTES = tuple(KIB * 4**step for step in range(10))
LARGE = (64 * MIB, 256 * MIB)
QUICK_BYTES, QUICK_SIZE, QUICK_TENSORS = (KIB,), 2**7, 12
ROUNDS, CALLS, QUICK_CALLS = 9, 20, 2
RANKS_SECONDS = 75.0

RESNET, RANKS = "ResNet-50, 8 on one GPU", "2 NCCL ranks on one GPU"
PLAIN = ("num_packs=0", "num_packs=1", "flat")  # ways of a plain call
RAW, IN_PLACE = "raw NCCL", "cuda, in place"
NOT_YET = "not yet measured on a GPU"
H100 = "H100, 2026-11"


def on_one(nbytes: int) -> str:
    """Returns the case name of one tensor on eight logical devices of one GPU."""
    return f"one tensor, {nbytes} bytes, {NUM_LOGICAL} on one GPU"


def on_several(nbytes: int) -> str:
    """Returns the case name of one tensor on all GPUs."""
    return f"one tensor, {nbytes} bytes, each on a GPU"


GPU_FLOORS = (
    Floor("co-located all-reduce, of the line", on_one(LARGE[-1]), of_the_copy("cuda"), ">=", 0.9,
          f"0.95; {H100}"),
    Floor("plain step, host us a Buffer", RESNET, counted("num_packs=1, host us a Buffer"), "<=",
          6, f"1.5; {H100}"),
    Floor("prepared step, host us of all Buffers", RESNET,
          counted("num_packs=1, prepared, host us"), "<=", 30, f"20.9 and 22.5; {H100}"),
    Floor("captured step, host us of all Buffers", RESNET,
          counted("num_packs=1, captured, host us"), "<=", 20, f"12.4 and 13.8; {H100}"),
    Floor("NCCL, host us over a raw call", RANKS, counted("us over raw"), "<=", 10, NOT_YET),
    *(
        Floor(f"{nbytes // MIB} MiB, of raw NCCL", on_several(nbytes),
              times_the_peer(RAW, IN_PLACE), ">=", 0.97, NOT_YET)
        for nbytes in LARGE
    ),
)  # fmt: skip

_STUB = (
    "it was set with a driver that does nothing ({}); CuPy and a real driver take {} us for "
    "{}, and the host of the H100 is slower"
)
GPU_DECISIONS = {
    "prepared step, host us of all Buffers": Decision(
        20, _STUB.format("8.4", "4.6", "each of three launches")
    ),
    "captured step, host us of all Buffers": Decision(10, _STUB.format("5.5", "1.8", "the graph")),
}


class GpuBench:
    """The measurements on machines with a GPU."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.absent: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def run(self) -> None:
        """Runs all cases."""
        self.one_gpu()
        self.ranks()
        self.all_gpus()

    def keep(self, case: Case) -> None:
        """Prints and stores a case."""
        case.show()
        self.cases[case.name] = case

    # -- one GPU --------------------------------------------------------------------------------

    def one_gpu(self) -> None:
        """Reduces replicas on the same GPU, without a link."""
        peers, self.absent = find_peers(on_gpu=True)
        with gr.open_mesh([0] * NUM_LOGICAL, backend="cuda") as mesh:
            clock = clock_of(mesh, quick=self.quick)
            for nbytes in QUICK_BYTES if self.quick else SWEEP_BYTES:
                cross_device_ops, pairs = _one_tensor(
                    mesh, nbytes, "hierarchical_copy", gr.ReduceOp.MEAN
                )
                calls: dict[str, Call] = {
                    f"{OURS}cuda": partial(cross_device_ops.batch_reduce, gr.ReduceOp.MEAN, pairs),
                    f"{OURS}cuda, prepared": cross_device_ops.prepare(gr.ReduceOp.MEAN, pairs),
                }
                if nbytes == LARGE[0]:  # inputs and outs of their own: not too large
                    operands = [normals(nbytes // 4)] * NUM_LOGICAL
                    for peer in peers:
                        calls |= peer.calls("all_sum", operands, operands)
                self._reduced(clock, on_one(nbytes), calls, (nbytes, 1))
            self._resnet(mesh, clock)

    def _resnet(self, mesh: Mesh, clock: Clock) -> None:
        """Measures GPU and host time for the gradients of a model."""
        shapes = resnet50()
        if self.quick:
            shapes = [(min(math.prod(shape), QUICK_SIZE),) for shape in shapes[:QUICK_TENSORS]]
        own = [[fill(device.empty(shape, "float32")) for device in mesh] for shape in shapes]
        buffers = mesh.flat_buffer(shapes, "float32")
        for buffer in buffers.buffers:
            fill(buffer)
        flat = [list(column) for column in zip(*buffers.views, strict=True)]
        calls: dict[str, Call] = {}
        for name, num_packs, tensors in zip(PLAIN, (0, 1, 1), (own, own, flat), strict=True):
            cross_device_ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", num_packs, mesh=mesh)
            values = [gr.PerReplica(each, mesh) for each in tensors]
            calls |= _ways(cross_device_ops, name, [(value, value) for value in values])
        number = QUICK_CALLS if self.quick else CALLS
        seconds = host_seconds(calls, number, quick=self.quick)
        mesh.synchronize()
        figures = {f"{name}, host us": taken * 1e6 for name, taken in seconds.items()}
        # A plain call looks at every Buffer; a prepared or captured one at none.
        num_buffers = NUM_LOGICAL * len(shapes)
        for name in PLAIN:
            figures[f"{name}, host us a Buffer"] = seconds[name] * 1e6 / num_buffers
        ours = {f"{OURS}cuda, {name}": call for name, call in calls.items()}
        nbytes = 4 * sum(math.prod(shape) for shape in shapes)
        self._reduced(clock, RESNET, ours, (nbytes, len(shapes)), figures)

    def _reduced(
        self,
        clock: Clock,
        name: str,
        calls: Mapping[str, Call],
        size: tuple[int, int],
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Measures candidates on eight logical devices; ``size``: bytes and number of tensors."""
        nbytes, num_tensors = size
        moved = 2 * NUM_LOGICAL * nbytes
        took = clock.measure(calls, moved)
        words = f"{num_tensors} tensors, {nbytes / 1e6:.2f} MB of float32"
        self.keep(Reduced(name, words, moved, took, figures or {}, nbytes, NUM_LOGICAL))

    # -- NCCL on one GPU ------------------------------------------------------------------------

    def ranks(self) -> None:
        """Measures two ranks on one GPU, in a child process with a deadline."""
        from cupy.cuda import nccl

        if not nccl.available or nccl.get_version() < FIRST_TO_SHARE:
            self.absent["ranks on one GPU"] = f"they need NCCL {FIRST_TO_SHARE} or newer"
            return
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "cost.json"
            quick = ("--quick",) if self.quick else ()
            words = ("-m", "gpu_check.ranks", "cost", "2", str(report), *quick)
            command = python(*words, fake=_is_fake())
            try:
                subprocess.run(command, env={**os.environ, **SHARED_GPU}, timeout=RANKS_SECONDS,
                               check=True)  # fmt: skip
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                self.absent["ranks on one GPU"] = str(error)
                return
            figures = json.loads(report.read_text(encoding="utf-8"))
        self.keep(Case(RANKS, "host us of a call", figures=figures))

    # -- several GPUs ---------------------------------------------------------------------------

    def all_gpus(self) -> None:
        """Measures NCCL with one replica per GPU, compared with direct calls of NCCL."""
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if count < 2:
            self.absent["several GPUs"] = f"there is {count}"
            return
        with gr.open_mesh(count, backend="cuda") as mesh:
            raw = RawNccl(mesh)
            for nbytes in QUICK_BYTES if self.quick else SWEEP_BYTES:
                self._on_several(mesh, raw, nbytes)

    def _on_several(self, mesh: Mesh, raw: RawNccl, nbytes: int) -> None:
        cross_device_ops, pairs = _one_tensor(mesh, nbytes, "nccl", gr.ReduceOp.SUM)
        calls: dict[str, Call] = {
            RAW: partial(raw.all_reduce, raw.arguments(pairs[0][0])),
            f"{OURS}cuda": partial(cross_device_ops.batch_reduce, gr.ReduceOp.SUM, pairs),
            f"{OURS}cuda, prepared": cross_device_ops.prepare(gr.ReduceOp.SUM, pairs),
        }
        reduce: Callable[..., Any] = cross_device_ops.batch_reduce
        if "out" in inspect.signature(reduce).parameters:
            out = [pairs[0][0]]
            calls[OURS + IN_PLACE] = partial(reduce, gr.ReduceOp.SUM, pairs, out=out)
        number = QUICK_CALLS if self.quick else CALLS
        took = back_to_back(mesh, calls, number, partial(_refilled, pairs[0][0]))
        words = f"{nbytes / 1e6:.3f} MB of float32"
        self.keep(Reduced(on_several(nbytes), words, 0, took, {}, nbytes, len(mesh), RAW))


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


def _refilled(value: gr.PerReplica) -> None:
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


def _one_tensor(
    mesh: Mesh, nbytes: int, algorithm: AllReduceAlg, op: gr.ReduceOp
) -> tuple[gr.AllReduceCrossDeviceOps, list[tuple[Any, Any]]]:
    """Returns a ``CrossDeviceOps`` after a first call, and its inputs."""
    shape = (nbytes // 4,)
    value = gr.PerReplica([fill(device.empty(shape, "float32")) for device in mesh], mesh)
    cross_device_ops = gr.AllReduceCrossDeviceOps(algorithm, 0, mesh=mesh)
    pairs = [(value, value)]
    cross_device_ops.batch_reduce(op, pairs)
    return cross_device_ops, pairs


def _ways(
    cross_device_ops: gr.AllReduceCrossDeviceOps, name: str, pairs: Sequence[tuple[Any, Any]]
) -> dict[str, Call]:
    """Returns plain, prepared and, where possible, captured calls."""
    made: dict[str, Call] = {
        name: partial(cross_device_ops.batch_reduce, gr.ReduceOp.MEAN, pairs),
        f"{name}, prepared": cross_device_ops.prepare(gr.ReduceOp.MEAN, pairs),
    }
    capture: Callable[..., Call] | None = getattr(cross_device_ops, "capture", None)
    if capture is not None:
        made[f"{name}, captured"] = capture(gr.ReduceOp.MEAN, pairs)
    return made


def _is_fake() -> bool:
    """Returns whether CuPy is the fake of the tests."""
    import cupy

    return bool(getattr(cupy, "FAKE", False))
