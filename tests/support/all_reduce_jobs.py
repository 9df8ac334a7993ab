"""Runs one part of a reduction without the pipeline: packing, or an algorithm."""

from collections.abc import Sequence

import numpy as np
from support.meshes import owned

from gradreduce.device import Buffer, Device, Mesh
from gradreduce.reduce.algorithm import Job, ReductionGroups
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.hierarchical_copy import HierarchicalCopy
from gradreduce.reduce.pack_buffers import PackBuffers, lay_out, move, moves_in
from gradreduce.reduce.packing import FlatPlan

__all__ = ["make_jobs", "pack", "reduce_jobs"]


def make_jobs(
    mesh: Mesh,
    packs: Sequence[Sequence[np.ndarray]],
    divisor: float = 1,
    *,
    in_place: bool = False,
    out_dtype: np.dtype | None = None,
) -> list[Job]:
    """Returns a job for each ``packs[k][replica]``, on memory of the pools."""
    jobs = []
    for replicas in packs:
        inputs = tuple(owned(device, array) for device, array in zip(mesh, replicas, strict=True))
        outs = inputs
        if not in_place:
            outs = tuple(b.device.empty(b.shape, out_dtype or b.dtype) for b in inputs)
        jobs.append(Job(inputs, outs, divisor))
    return jobs


def reduce_jobs(name: str, jobs: Sequence[Job], groups: ReductionGroups | None = None) -> None:
    """Reduces jobs on the same devices, all in one stage, on the compute queues."""
    devices = [buffer.device for buffer in jobs[0].inputs]
    algorithm = ALGORITHMS[name](devices, groups)
    with devices[0].mesh_state.launch_lock:
        for _ in algorithm.all_reduce(algorithm.allocate(jobs), "compute"):
            pass


def pack(
    plans: Sequence[FlatPlan],
    gradients: Sequence[Sequence[Buffer]],
    devices: Sequence[Device],
    *,
    consume: bool,
) -> list[PackBuffers]:
    """Allocates flat buffers and packs ``gradients[tensor][replica]`` into them."""
    algorithm = HierarchicalCopy(devices)
    made = lay_out(plans, gradients, algorithm, consume=consume)
    move(moves_in([(each, 0, each.plan.layout.size) for each in made], 1))
    return made
