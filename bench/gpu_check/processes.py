"""Tests NCCL's collectives over two processes that share one GPU.

The processes look like two hosts to NCCL, which connects them by sockets of the loopback device.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure.in_processes import figures_of_each

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.comm.process_group import ProcessGroup
from gradreduce.device import Message

from .ranks import RANKS_SECONDS, Figures, values
from .setting import hosts, python

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int16", "int32", "uint8")
REPLICAS = 2  # of each process
SIZES, QUICK_SIZES = (8, 1_200_008), (8, 2008)
TIMEOUT = 60.0
LOOK_SECONDS = 5e-3


class FileGroup(ProcessGroup):
    """Processes that post their notices as files, and exchange between GPUs by our communicator."""

    gpu_library = "nccl"
    sends_host_memory = False

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(rank, size, TIMEOUT)
        self._folder = folder

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        raise AssertionError("GPU memory does not go through host memory")

    def post(self, key: str, text: str) -> None:
        path = self._path(self.rank, key)
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        path, end = self._path(rank, key), time.monotonic() + seconds
        while not path.is_file():
            if time.monotonic() >= end:
                return None
            time.sleep(LOOK_SECONDS)
        return path.read_text()

    def _path(self, rank: int, key: str) -> Path:
        return self._folder / f"{rank}-{key.replace('/', '-')}.txt"


def together(quick: bool, count: int, library: str) -> Figures:
    """Starts the processes; ``library``: ``"ours"``, or ``"torch"`` for a group of PyTorch."""
    import cupy

    with tempfile.TemporaryDirectory() as folder:
        found = figures_of_each(
            "gpu_check.processes:one_process",
            [(quick, count, rank, library, folder) for rank in range(count)],
            python(fake=getattr(cupy, "FAKE", False)),
            RANKS_SECONDS,
            hosts(count, NCCL_MULTI_RANK_GPU_ENABLE="1"),
        )
    return {"processes": count, "compared": sum(found), "dtypes": DTYPES}


def one_process(quick: bool, count: int, rank: int, library: str, folder: str) -> int:
    """Sums in one process; returns the number of compared results."""
    group: Any = FileGroup(Path(folder), rank, count)
    if library == "torch":
        group = torch_group(Path(folder), rank, count)
    with open_mesh([0] * REPLICAS, backend="cuda", process_group=group, timeout=TIMEOUT) as mesh:
        if count > 1:
            assert mesh.mesh_state.processes.collective is not None, "NCCL is not used"
        sizes = QUICK_SIZES if quick else SIZES
        return sum(compare(mesh, size, dtype) for size in sizes for dtype in DTYPES)


def torch_group(folder: Path, rank: int, count: int) -> Any:
    import torch.distributed as dist

    store = f"file://{folder / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=count)
    return dist.group.WORLD


def compare(mesh: gr.Mesh, size: int, dtype: str) -> int:
    """Compares every collective with NumPy; returns the number of compared results."""
    ops, first = gr.NcclAllReduce(mesh=mesh), mesh.process_index * REPLICAS
    terms = [values(size, dtype, replica) for replica in range(mesh.num_replicas)]
    total = np.sum(terms, axis=0, dtype=terms[0].dtype)
    mine = zip(mesh, terms[first : first + REPLICAS], strict=True)
    value = gr.PerReplica([device.upload(term) for device, term in mine], mesh)
    step = ops.prepare(gr.ReduceOp.SUM, [(value, value)])
    shares = ops.reduce_scatter([[buffer] for buffer in value.buffers], gr.ReduceOp.SUM)
    whole = ops.all_gather(shares)
    copied = ops.broadcast(value.buffers[0], mesh, process=mesh.num_processes - 1)
    wanted = {
        "all_reduce": ([*step()[0].buffers, *step()[0].buffers], total),
        "reduce_scatter and all_gather": ([row[0] for row in whole], total),
        "broadcast": (copied.buffers, terms[-REPLICAS]),
    }
    check = partial(np.testing.assert_array_equal, strict=True)
    for name, (buffers, expected) in wanted.items():
        for buffer in buffers:
            check(buffer.numpy(), expected, f"{name} of {size} {dtype}, process {os.getpid()}")
    return sum(len(buffers) for buffers, _ in wanted.values())
