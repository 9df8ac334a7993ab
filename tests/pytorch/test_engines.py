"""Compiled autograd, DDP's reducer in Python, and tensors without values are refused."""

from __future__ import annotations

import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch
NO_VALUES = (
    "a DataParallel averages values, which a FakeTensor does not have: make it, and call backward, "
    "outside FakeTensorMode"
)


def replicas(mesh):
    nets = [torch.nn.Linear(3, 1, bias=False) for _ in mesh]
    for net in nets:
        torch.nn.init.ones_(net.weight)
    return nets


def backward(dp):
    """Calls ``backward`` of each replica; returns their gradients."""
    dp.zero_grad()
    for index, replica in enumerate(dp.replicas):
        replica(torch.full((1, 3), 1.0 + index)).sum().backward()
    return [replica.weight.grad.tolist() for replica in dp.replicas]


def test_compiled_autograd_is_refused_before_anything_is_averaged():
    with gr.open_mesh(2, backend="sim") as mesh:
        dp = gr.torch.DataParallel(replicas(mesh), mesh)
        for _ in range(2):  # before and after there are buckets
            enabled = torch._dynamo.config.patch(compiled_autograd=True)
            with enabled, pytest.raises(RuntimeError) as caught:
                torch.compile(backward, backend="eager")(dp)
            assert str(caught.value) == (
                "a DataParallel does not work with compiled autograd, which does not say when a "
                "backward ends: set torch._dynamo.config.compiled_autograd = False, or call "
                "backward outside the compiled function"
            )
            assert backward(dp) == [[[1.5] * 3]] * 2


@pytest.mark.usefixtures("one_process")
def test_the_reducer_of_ddp_in_python_is_refused():
    from torch.nn.parallel import DistributedDataParallel

    in_python = torch._dynamo.config.patch(optimize_ddp="python_reducer")
    with in_python, gr.open_mesh(1, backend="sim") as mesh:
        ddp = DistributedDataParallel(*replicas(mesh))
        ddp.register_comm_hook(None, gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh)))
        with pytest.raises(RuntimeError) as caught:
            ddp(torch.ones(1, 3)).sum().backward()
    assert str(caught.value) == (
        "comm_hook averages DDP's buckets, but DDP's python_reducer passes parameters: set "
        "torch._dynamo.config.optimize_ddp to another reducer, before DDP is made"
    )


def test_tensors_without_values_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with gr.open_mesh(2, backend="sim") as mesh:
        net = replicas(mesh)[0]
        dp = gr.torch.DataParallel(replicas(mesh), mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            faked = torch.nn.Linear(3, 1, bias=False)
            with pytest.raises(RuntimeError) as caught:
                gr.torch.DataParallel(net, mesh)
            assert str(caught.value) == NO_VALUES
        with pytest.raises(RuntimeError) as caught:
            gr.torch.DataParallel(faked, mesh)
        assert str(caught.value) == NO_VALUES
        for _ in range(2):  # before and after there are buckets
            with FakeTensorMode(allow_non_fake_inputs=True):
                loss = dp.replicas[0](torch.ones(1, 3)).sum()
                with pytest.raises(RuntimeError) as caught:
                    loss.backward()
            assert str(caught.value) == NO_VALUES
            dp.zero_grad(set_to_none=True)
            assert backward(dp) == [[[1.5] * 3]] * 2
