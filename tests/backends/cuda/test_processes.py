"""Meshes of GPUs over several processes, which are threads in these tests."""

import numpy as np
import pytest
from support.thread_group import run_processes

import gradreduce as gr

pytestmark = [pytest.mark.gpu, pytest.mark.fake_cupy]


@pytest.mark.parametrize("size", [7, 30000])
def test_processes_sum_by_way_of_host_memory(size, gpus):
    gpus(2)
    random = np.random.default_rng(0)
    grads = [[random.standard_normal(size, np.float32)] for _ in range(4)]

    def work(group):
        mesh = gr.open_mesh([group.rank] * 2, backend="cuda", process_group=group)
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        mine = grads[2 * group.rank : 2 * group.rank + 2]
        value = gr.PerReplica(
            [device.put(each[0]) for device, each in zip(mesh, mine, strict=True)]
        )
        step = ops.prepare(gr.ReduceOp.MEAN, [(value, value)])
        plain = ops.all_reduce(mine, gr.ReduceOp.MEAN)[1][0].get()
        found = [plain, step()[0].values[1].numpy()]
        mesh.close()
        return found

    with gr.open_mesh(4, backend="sim") as mesh:
        ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
        wanted = ops.all_reduce(grads, gr.ReduceOp.MEAN)[0][0]
    for found in run_processes(2, work):
        for each in found:
            assert np.array_equal(wanted, each)
