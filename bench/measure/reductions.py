"""Our own all-reduces, as candidates: values on the devices of a mesh, and their reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import gradreduce as gr
from gradreduce.arrays.types import AllReduceAlg
from gradreduce.device import Mesh

from .clock import Call
from .operands import fill
from .runner import Bench


def placed(
    mesh: Mesh, shapes: Sequence[tuple[int, ...]], *, flat: bool = False
) -> list[gr.PerReplica]:
    """Returns random float32 tensors on all devices, each on its own or all in flat buffers."""
    if flat:
        buffers = mesh.flat_buffer(shapes, "float32")
        for buffer in buffers.buffers:
            fill(buffer)
        return [gr.PerReplica(list(column), mesh) for column in zip(*buffers.views, strict=True)]
    return [
        gr.PerReplica([fill(device.empty(shape, "float32")) for device in mesh], mesh)
        for shape in shapes
    ]


def uploaded(
    values: Sequence[gr.PerReplica], tensors: Sequence[Sequence[np.ndarray]]
) -> Sequence[gr.PerReplica]:
    """Uploads the replicas of each tensor, and returns the values."""
    for value, replicas in zip(values, tensors, strict=True):
        for buffer, replica in zip(value.buffers, replicas, strict=True):
            buffer.device.upload(replica, out=buffer)
    return values


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of some values; the options are those of ``gr.AllReduceCrossDeviceOps``."""

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


def compare(
    bench: Bench,
    name: str,
    reduction: Reduction,
    calls: Mapping[str, Call],
    figures: Mapping[str, float] | None = None,
) -> None:
    """Measures candidates for a reduction, and a copy as the baseline, in turns.

    The copy reads each replica once and writes each result once, as an all-reduce must.
    """
    nbytes = sum(value.buffers[0].nbytes for value in reduction.values)
    words = f"{len(reduction.values)} tensors, {nbytes / 1e6:.2f} MB of float32"
    bench.compare(name, words, 2 * len(reduction.mesh) * nbytes, calls, figures)
