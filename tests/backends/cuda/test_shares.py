"""Reduce-scatter, all-gather and sharded updates on GPUs have the bits of the simulation."""

import numpy as np
import pytest
from support.thread_group import run_processes

import gradreduce as gr

pytestmark = [pytest.mark.gpu, pytest.mark.fake_cupy]


def trained(mesh, first, num_replicas, shard):
    variables = [
        gr.Variable(np.ones(size), f"v{size}", dtype="float16", device=mesh) for size in (5, 3000)
    ]
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    optimizer = gr.AdamOptimizer(0.1, master_dtype="float32")
    step = gr.SyncStep(variables, optimizer, ops, shard_optimizer=shard)
    random = np.random.default_rng(0)
    for _ in range(3):
        rows = [
            [[random.standard_normal(v.shape).astype("f2")] for v in variables]
            for _ in range(num_replicas)
        ]
        step(rows[first : first + len(mesh)])
    slots = step.state_dict()["optimizer"]["slots"]["v3000"]
    return [v.buffers[-1].numpy() for v in variables], slots


def test_a_sharded_step_of_several_processes_has_the_same_bits(gpus):
    gpus(3)
    with gr.open_mesh(4, backend="sim") as mesh:
        wanted = trained(mesh, 0, 4, False)

    def work(group):
        placement = [[0, 1], [2, 2]][group.rank]
        with gr.open_mesh(placement, backend="cuda", process_group=group) as mesh:
            return trained(mesh, 2 * group.rank, 4, True)

    for found in run_processes(2, work):
        np.testing.assert_equal(found, wanted)


@pytest.mark.parametrize("seed", [0, 1, 3])  # a lazy, an eager and a random machine
def test_between_gpus_no_byte_of_a_step_goes_by_host_memory(seed, new_machine):
    from fake_cupy import nccl

    from gradreduce.backends.cuda import device as cuda

    machine = new_machine(seed)
    nccl.library.patience = 10.0
    counts = (2, 1, 1)
    with gr.open_mesh(4, backend="sim") as mesh:
        wanted = trained(mesh, 0, 4, False)

    def work(group):
        with gr.open_mesh(
            [group.rank] * counts[group.rank], backend="cuda", process_group=group
        ) as mesh:
            found = trained(mesh, sum(counts[: group.rank]), 4, True)
            ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
            shares = [[device.upload(np.full(5, group.rank, np.float32))] for device in mesh]
            with mesh.journal() as journal:
                whole = ops.all_gather(shares)
                again = ops.reduce_scatter(whole)
            assert not {record.kind for record in journal.records} & {"upload", "download", "sync"}
            return found, [row[0].numpy().tolist() for row in again]

    for rank, (found, again) in enumerate(run_processes(3, work, gpu_library="nccl")):
        np.testing.assert_equal(found, wanted)
        assert again == [[float(rank)] * 5] * counts[rank]
    machine.settle()
    cuda._RETAINED.clear()
