"""assert_mirrored on modules: replicas of one process, one module in each, DataParallel."""

import copy

import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import open_mesh

import gradreduce as gr

pytestmark = pytest.mark.torch


def error_of(modules, *mesh):
    """The text of the error that ``assert_mirrored`` raises."""
    with pytest.raises(AssertionError) as error:
        gr.assert_mirrored(modules, *mesh)
    return str(error.value)


def make(dtype=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    return net.to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_parameter_that_differs_is_named(dtype):
    net, nan = make(getattr(torch, dtype)), float("nan")
    replicas = [net, copy.deepcopy(net), copy.deepcopy(net)]
    replicas[1][1].running_mean.fill_(3.0)  # a buffer
    gr.assert_mirrored(replicas)
    with torch.no_grad():
        replicas[2][1].bias[4] = 2.0
        replicas[1][0].weight[29, 39] = nan
        replicas[2][0].weight[29, 39] = nan
        net[0].weight[29, 39] = 1.5
    text = "'0.weight'[29, 39] differs: 1.5 in replica 0, nan in replica 1"
    assert error_of(torch.nn.ModuleList(replicas)) == text
    with torch.no_grad():
        net[0].weight[29, 39] = nan
    assert error_of(replicas) == "'1.bias'[4] differs: 0.0 in replica 0, 2.0 in replica 2"
    replicas[1][0] = torch.nn.Linear(40, 31)
    text = f"'0.weight' ({dtype}[30, 40]) in replica 0 is '0.weight' (float32[31, 40]) in replica 1"
    assert error_of(replicas) == text
    others = [net, torch.nn.Sequential(*net, torch.nn.PReLU())]
    assert error_of(others) == "replica 0 has 4 tensors, replica 1 5"


def test_modules_of_several_processes():
    nets = [make() for _ in range(2)]  # here: the generator of random numbers is that of all

    def work(group):
        with open_mesh(1, group) as mesh:
            net = nets[group.rank]
            gr.assert_mirrored(net, mesh)
            dp = gr.torch.DataParallel(net, mesh)
            gr.assert_mirrored(dp, mesh)
            with torch.no_grad():
                net[1].weight[3] = 1.0 + group.rank
            odd = [net, torch.nn.PReLU()] if group.rank == 1 else [net, net]
            return [error_of(modules, mesh) for modules in (dp, [net, net], odd)]

    assert run_processes(2, work) == [[
        "'1.weight'[3] differs: 1.0 in replica 0 (process 0), 2.0 in replica 1 (process 1)",
        "'1.weight'[3] differs: 1.0 in replica 0 (process 0), 2.0 in replica 2 (process 1)",
        "'0.weight' (float32[30, 40]) in replica 0 (process 0) is 'weight' (float32[1]) in "
        "replica 3 (process 1)",
    ]] * 2  # fmt: skip


def test_replicas_of_data_parallel_in_one_process(mesh):
    dp = gr.torch.DataParallel(make(), mesh)
    gr.assert_mirrored(dp, mesh)
    with torch.no_grad():
        dp.replicas[1][1].bias[0] = 1.0
    for modules in (dp, dp.replicas, list(dp.replicas)):
        assert error_of(modules, mesh).startswith("'1.bias'[0] differs")
    with pytest.raises(ValueError, match=r"^one module has no copies: pass a list of replicas"):
        gr.assert_mirrored(dp.module)
    with pytest.raises(TypeError, match=r"^3 is not a torch.nn.Module, as the first replica"):
        gr.assert_mirrored([dp.module, 3])
    gr.assert_mirrored([torch.nn.ReLU(), torch.nn.ReLU()], mesh)
