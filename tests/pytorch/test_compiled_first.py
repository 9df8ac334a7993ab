"""Calls of ``gr.torch`` compile their kernels before their first launch, and not again."""

import pytest
from support.compiled_first import check_compiled_first
from support.libraries import torch
from support.meshes import MeshCase

import gradreduce as gr

pytestmark = pytest.mark.torch


def net(dtype):
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)


def backward(module, dtype):
    module(torch.ones((2, 3), dtype=dtype)).sum().backward()


def optimizer_steps(mesh):
    table = torch.nn.Embedding(4, 3, sparse=True, dtype=torch.float64)
    modules = [net(torch.float32), net(torch.bfloat16)]
    groups = [{"params": gr.torch.variables(each, mesh)} for each in (*modules, table)]
    inner = gr.MomentumOptimizer(0.1, 0.9, master_dtype="float32")
    optimizer = gr.torch.Optimizer(inner, groups)
    yield
    for _ in range(2):
        for module in modules:
            backward(module, module[0].weight.dtype)
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        yield


def data_parallel(mesh):
    for dtype in (torch.float32, torch.bfloat16):
        parallel = gr.torch.DataParallel(net(dtype), mesh=mesh)
        yield
        for _ in range(3):
            for replica in parallel.replicas:
                backward(replica, dtype)
            yield


def hook_of_buckets(mesh):
    module = torch.nn.parallel.DistributedDataParallel(net(torch.float32))
    module.register_comm_hook(None, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
    for _ in range(3):
        backward(module, torch.float32)
        yield


def reduce_scatter(mesh):
    scatter = gr.torch.ReduceScatter(gr.AllReduceCrossDeviceOps(mesh=mesh))
    for dtype in (torch.float32, torch.bfloat16):
        share, inputs = torch.empty(8, dtype=dtype), torch.ones(8, dtype=dtype)
        scatter(share, inputs, torch.distributed.group.WORLD, torch.distributed.ReduceOp.AVG)
        yield


@pytest.mark.parametrize(
    ("calls", "placement"), [(optimizer_steps, (0,)), (data_parallel, (0, 0, 1))]
)
def test_no_call_compiles_after_its_first_launch(calls, placement):
    with MeshCase(placement).open() as mesh:
        check_compiled_first(mesh, calls)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("calls", [hook_of_buckets, reduce_scatter])
def test_nor_does_a_call_over_processes(calls):
    with gr.open_mesh(1, backend="sim", process_group=torch.distributed.group.WORLD) as mesh:
        check_compiled_first(mesh, calls)
