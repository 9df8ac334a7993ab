"""Compiled autograd, DDP's reducer in Python, and tensors without values are refused."""

import re
from functools import partial

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


def raises(text):
    return pytest.raises(RuntimeError, match=f"^{re.escape(text)}$")


def backward(dp):
    """Calls ``backward`` of each replica; returns their gradients."""
    dp.zero_grad()
    for index, replica in enumerate(dp.replicas):
        replica(torch.full((1, 3), 1.0 + index)).sum().backward()
    return [replica.weight.grad.tolist() for replica in dp.replicas]


def test_compiled_autograd_is_refused_before_anything_is_averaged(mesh):
    dp = gr.torch.DataParallel(replicas(mesh), mesh)
    text = (
        "a DataParallel does not work with compiled autograd, which does not say when a backward "
        "ends: set torch._dynamo.config.compiled_autograd = False, or call backward outside the "
        "compiled function"
    )
    for _ in range(2):  # before and after there are buckets
        with torch._dynamo.config.patch(compiled_autograd=True), raises(text):
            torch.compile(backward, backend="eager")(dp)
        assert backward(dp) == [[[1.5] * 3]] * 2


@pytest.mark.usefixtures("one_process")
def test_the_reducer_of_ddp_in_python_is_refused(mesh):
    hook = gr.torch.comm_hook(gr.AllReduceCrossDeviceOps(mesh=mesh[:1]))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = torch.nn.parallel.DistributedDataParallel(*replicas(mesh[:1]))
        ddp.register_comm_hook(None, hook)
        with raises(
            "comm_hook averages DDP's buckets, but DDP's python_reducer passes parameters: set "
            "torch._dynamo.config.optimize_ddp to another reducer, before DDP is made"
        ):
            ddp(torch.ones(1, 3)).sum().backward()


def test_tensors_without_values_are_refused(mesh):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_tensors = partial(FakeTensorMode, allow_non_fake_inputs=True)
    net = replicas(mesh)[0]
    dp = gr.torch.DataParallel(replicas(mesh), mesh)
    with fake_tensors():
        faked = torch.nn.Linear(3, 1, bias=False)
        with raises(NO_VALUES):
            gr.torch.DataParallel(net, mesh)
    with raises(NO_VALUES):
        gr.torch.DataParallel(faked, mesh)
    for _ in range(2):  # before and after there are buckets
        with fake_tensors():
            loss = dp.replicas[0](torch.ones(1, 3)).sum()
            with raises(NO_VALUES):
                loss.backward()
        dp.zero_grad(set_to_none=True)
        assert backward(dp) == [[[1.5] * 3]] * 2
