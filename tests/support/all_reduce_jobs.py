"""Runs one part of a reduction without the pipeline: packing, or an algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Buffer, Device
from gradreduce.reduce.algorithm import Job, ReductionGroups
from gradreduce.reduce.algorithms import ALGORITHMS
from gradreduce.reduce.hierarchical_copy import HierarchicalCopy
from gradreduce.reduce.pack_buffers import PackBuffers, lay_out, move, moves_in
from gradreduce.reduce.packing import FlatPlan

__all__ = ["pack", "reduce_jobs"]


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
    move(moves_in([(each, 0, each.plan.layout.size) for each in made]))
    return made
