"""Our own all-reduces, as candidates: values on the devices of a mesh, and their reductions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.device import Buffer, Mesh

from .case import Figures
from .clock import Call, Calls
from .operands import Shapes, fill
from .runner import NONE, Bench


def placed(
    mesh: Mesh, shapes: Shapes, *, flat: bool = False, first: int = 0
) -> list[gr.PerReplica]:
    """Returns float32 tensors on all devices, each on its own or all in flat buffers.

    Replica r of a tensor has the integers of ``first`` plus r.
    """
    if flat:
        buffers = mesh.flat_buffer(shapes, "float32")
        for replica, buffer in enumerate(buffers.buffers):
            fill(buffer, replica=first + replica)
        return [gr.PerReplica(list(column), mesh) for column in zip(*buffers.views, strict=True)]
    return [
        gr.PerReplica(
            [fill(each.empty(shape, "float32"), replica=first + each.index) for each in mesh], mesh
        )
        for shape in shapes
    ]


def check(results: Iterable[Sequence[np.ndarray]], firsts: Iterable[np.ndarray]) -> None:
    """Raises if a result on a device is not the mean of replicas, of which the first is given."""
    for place, (found, first) in enumerate(zip(results, firsts, strict=True)):
        wanted = first + np.float32((len(found) - 1) / 2)
        for index, result in enumerate(found):
            if not np.array_equal(result, wanted):
                raise AssertionError(f"tensor {place} on device {index} is not the mean")


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of ``placed`` values; the options are those of ``AllReduceCrossDeviceOps``."""

    mesh: Mesh
    values: Sequence[gr.PerReplica]
    num_packs: int = 1
    algorithm: AllReduceAlg = "hierarchical_copy"
    op: gr.ReduceOp = gr.ReduceOp.MEAN

    @property
    def _pairs(self) -> list[tuple[Any, Any]]:
        return [(value, value) for value in self.values]

    @property
    def _ops(self) -> gr.AllReduceCrossDeviceOps:
        return gr.AllReduceCrossDeviceOps(self.algorithm, self.num_packs, mesh=self.mesh)

    def plain(self, *, in_place: bool = False) -> Call:
        """Returns a plain call; its results are new if it is not in place."""
        out = list(self.values) if in_place else None
        return partial(self._ops.batch_reduce, self.op, self._pairs, out=out)

    def prepared(self, *, in_place: bool = False) -> Call:
        out = list(self.values) if in_place else None
        return self._ops.prepare(self.op, self._pairs, out=out)

    def captured(self) -> Call:
        return self._ops.capture(self.op, self._pairs)

    def checked(self, make: Callable[[], Call]) -> Call:
        """Makes and returns a call, after a first one that is checked; ``prepare`` reduces too."""
        firsts = [value.buffers[0].numpy().copy() for value in self.values]
        call = make()
        check(([each.numpy() for each in value.buffers] for value in call()), firsts)
        return call


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


def compare(
    bench: Bench, name: str, reduction: Reduction, calls: Calls, figures: Figures = NONE
) -> None:
    """Measures candidates for a reduction, and a copy as the baseline, in turns.

    The copy reads each replica once and writes each result once, as an all-reduce must.
    """
    nbytes = sum(value.buffers[0].nbytes for value in reduction.values)
    words = f"{len(reduction.values)} tensors, {nbytes / 1e6:.2f} MB of float32"
    bench.compare(name, words, 2 * len(reduction.mesh) * nbytes, calls, figures)
