"""Memory of a caller that a queue of another GPU uses: the caller's stream and it are ordered."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import gradreduce as gr

ONES = np.ones(400, np.float32)
pytestmark = [pytest.mark.fake_cupy, pytest.mark.parametrize("seed", range(3))]


class Used:
    """A caller's array on the first GPU of a mesh, which its stream writes and the other reads."""

    def __init__(self, mesh):
        self.near, self.away = mesh.devices
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self.array = cupy.asarray(ONES)
        self.buffer = self.near.adopt(self.array, self.stream)
        self.out = self.away.upload(ONES)

    def read(self):
        self.away.copy(self.out, self.buffer)

    def overwrite(self):
        address, nbytes = self.array.data.ptr, self.array.nbytes
        cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)


def test_a_stream_waits_for_another_gpu_that_reads_its_memory(seed, gpus):
    gpus(seed)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        used = Used(mesh)
        used.read()
        used.near.block_stream(used.stream)
        used.overwrite()


def test_another_gpu_waits_for_a_stream_that_wrote_its_memory_again(seed, gpus):
    gpus(seed)
    with gr.open_mesh([0, 1], backend="cuda") as mesh:
        used = Used(mesh)
        used.read()
        used.near.block_stream(used.stream)
        used.overwrite()
        used.near.wait_for_stream(used.stream)
        used.read()
