"""Meshes on the fake's GPUs in several processes, which are threads."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cupy import distributed, nccl
from fake_cupy.machine import Machine
from support.thread_group import run_processes

import gradreduce as gr
from gradreduce.backends.cuda import device as cuda
from gradreduce.comm.process_group import ProcessGroup
from gradreduce.device import Mesh

# "ours": communicators of NCCL of our own. The others are configurations of PyTorch's groups.
LIBRARIES = ("ours", "cpu:gloo,cuda:nccl")
Work = Callable[[Mesh, range], Any]


@pytest.fixture
def here(request, gpus) -> Iterator[Machine]:
    made = gpus(getattr(request, "param", 3), num_gpus=8)
    nccl.library.patience = 10.0
    yield made
    made.settle()
    cuda._RETAINED.clear()  # memory of devices with an unfinished exchange


def run_groups(library: str, size: int, work: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Runs ``work(group)`` in each process; a group of PyTorch is a part of a larger one."""
    if library == "ours":
        return run_processes(size, work, gpu_library="nccl", **options)
    store, ranks = distributed.Store(), [5 + 2 * rank for rank in range(size)]

    def with_group(group: ProcessGroup) -> Any:
        return work(distributed.ProcessGroup(library, store, group.rank, ranks))

    with distributed.installed():
        return run_processes(size, with_group)


def run_all(library: str, places: list[list[int]], work: Work, **options: Any) -> list[Any]:
    """Runs ``work(mesh, replicas)`` in each process; returns the results by process.

    Args:
        places: the GPU of each replica, by process.
        options: arguments of ``open_mesh``.
    """
    firsts = [sum(map(len, places[:rank])) for rank in range(len(places) + 1)]

    def run(group: ProcessGroup) -> Any:
        rank = group.rank
        with gr.open_mesh(places[rank], backend="cuda", process_group=group, **options) as mesh:
            return work(mesh, range(firsts[rank], firsts[rank + 1]))

    return run_groups(library, len(places), run)


def on_devices(mesh: Mesh, arrays: list[np.ndarray]) -> gr.PerReplica:
    return gr.PerReplica([d.upload(a) for d, a in zip(mesh, arrays, strict=True)], mesh)
