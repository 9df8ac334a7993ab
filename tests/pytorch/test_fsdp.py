"""``gr.torch.ReduceScatter`` called like FSDP2 does, in processes that are threads.

Tests with real processes are in ``tests/comm/processes``.
"""

from types import SimpleNamespace

import pytest
from support.libraries import torch
from support.thread_group import run_processes

import gradreduce as gr

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]


def group_of(size):
    return SimpleNamespace(size=lambda: size)


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_each_process_gets_its_share_in_the_wire_dtype(op):
    import torch.distributed as dist

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            ops = gr.AllReduceCrossDeviceOps(mesh=mesh, wire_dtype="bfloat16")
            scatter = gr.torch.ReduceScatter(ops)
            device = torch.device("cpu")
            inputs = scatter.allocate((64,), dtype=torch.float32, device=device)
            inputs.copy_(torch.arange(64.0) * (1 + group.rank))
            share = scatter.allocate((32,), dtype=torch.float32, device=device)
            with mesh.journal() as journal:
                scatter(share, inputs, group_of(2), getattr(dist.ReduceOp, op))
            return share.tolist(), journal.bytes

    factor = {"SUM": 3.0, "AVG": 1.5}[op]
    (first, sent), (second, _) = run_processes(2, work)
    assert first + second == [factor * number for number in range(64)]
    assert sent == 2 * 32


def test_other_groups_and_operations_are_refused():
    import torch.distributed as dist

    with gr.open_mesh(1, backend="sim", process_group=dist.group.WORLD) as mesh:
        scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh))
        with pytest.raises(ValueError, match="over 2 processes, but the mesh has 1"):
            scatter(torch.empty(1), torch.empty(2), group_of(2), dist.ReduceOp.SUM)
        with pytest.raises(ValueError, match="MAX is neither SUM nor AVG"):
            scatter(torch.empty(1), torch.empty(1), group_of(1), dist.ReduceOp.MAX)
        with pytest.raises(TypeError, match="is not an AllReduceCrossDeviceOps"):
            gr.torch.ReduceScatter(mesh)
