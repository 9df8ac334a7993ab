"""``gr.torch.variables``: Variables that share memory with a module's parameters."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch


def open_mesh(devices=1, **options):
    return gr.open_mesh(devices, backend="sim", **options)


def net(dtype=None):
    """Two layers with integers; the second is frozen and has the bias of the first."""
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).to(dtype)
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.constant_(parameter, 1.0 + number)
    made[1].bias = made[0].bias
    made[1].weight.requires_grad_(False)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_variables_are_the_parameters_of_all_replicas(dtype):
    with open_mesh(2) as mesh:
        replicas = [net(getattr(torch, dtype)) for _ in range(2)]
        made = gr.torch.variables(torch.nn.ModuleList(replicas), mesh)
        assert [each.name for each in made] == ["0.weight", "0.bias", "1.weight"]  # bias: once
        assert [each.trainable for each in made] == [True, True, False]
        rows = zip(made, *(each.parameters() for each in replicas), strict=True)
        for variable, *parameters in rows:
            assert variable.devices == mesh.devices
            assert (variable.shape, variable.dtype) == (tuple(parameters[0].shape), dtype)
            for buffer, parameter in zip(variable.buffers, parameters, strict=True):
                assert buffer.address == parameter.data_ptr()
        made[0].assign(np.full((2, 3), 5, made[0].dtype))
        assert all((replica[0].weight == 5).all() for replica in replicas)
        for replica in replicas:
            replica.load_state_dict({key: each + 1 for key, each in replica.state_dict().items()})
        assert (made[0].numpy() == 6).all()  # loaded in place
        assert (made[2].read() == 4).all()


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_step_trains_replicas_with_the_bits_of_own_variables(shard_optimizer):
    torch.manual_seed(0)
    with open_mesh(2) as mesh:
        replicas = [torch.nn.Linear(5, 3) for _ in range(2)]
        replicas[1].load_state_dict(replicas[0].state_dict())
        own = [gr.Variable(each.detach().clone(), device=mesh) for each in replicas[0].parameters()]
        rows = [gr.torch.variables(replicas, mesh), own]
        steps = [
            gr.SyncStep(
                row,
                gr.AdamOptimizer(0.1),
                gr.AllReduceCrossDeviceOps(),
                shard_optimizer=shard_optimizer,
            )
            for row in rows
        ]
        for _ in range(3):
            terms = []
            for replica in replicas:
                replica.zero_grad()
                replica(torch.randn(4, 5)).square().mean().backward()
                terms.append([[each.grad] for each in replica.parameters()])
            for step in steps:
                step(terms)
        for replica in replicas:
            for parameter, variable in zip(replica.parameters(), own, strict=True):
                assert (parameter.detach().numpy() == variable.numpy()).all()


def replaced(module):
    module[0].weight = torch.nn.Parameter(module[0].weight.detach().clone())


def untied(module):
    module[1].bias = torch.nn.Parameter(module[0].bias.detach().clone())


def assigned(module):
    module.load_state_dict({key: each.clone() for key, each in module.state_dict().items()},
                           assign=True)  # fmt: skip


def transposed(module):
    module[1].weight.data = module[1].weight.data.t()


CHANGES = {
    "dtype": (lambda module: module.double(), "0.weight"),
    "replaced": (replaced, "0.weight"),
    "assigned": (assigned, "0.weight"),
    "untied": (untied, "0.bias"),
    "transposed": (transposed, "1.weight"),
}
USES = {
    "apply": lambda each, optimizer: optimizer.apply_gradients([(np.ones(each.shape, "f4"), each)]),
    "assign": lambda each, _: each.assign(np.zeros(each.shape, "f4")),
    "assign_add": lambda each, _: each.assign_add(np.zeros(each.shape, "f4")),
    "numpy": lambda each, _: each.numpy(),
    "read": lambda each, _: each + 1,
    "view": lambda each, _: each.array("torch"),
    "buffers": lambda each, _: each.buffers,
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_use_of_a_variable_takes_memory_that_is_not_the_parameter_any_more(change):
    do, name = CHANGES[change]
    with open_mesh() as mesh:
        module = net()
        (variable,) = [each for each in gr.torch.variables(module, mesh) if each.name == name]
        optimizer = gr.MomentumOptimizer(0.1, 0.9)
        for use in USES.values():
            use(variable, optimizer)
        parameter = module.get_parameter(name)
        do(module)
        before = parameter.detach().clone()
        for use in USES.values():
            with pytest.raises(RuntimeError, match=f"'{name}' was replaced or moved to other"):
                use(variable, optimizer)
        assert parameter.equal(before)
        assert variable.name in repr(variable)
        parameter.data = parameter.data.contiguous()
        (fresh,) = [each for each in gr.torch.variables(module, mesh) if each.name == name]
        assert fresh.buffers[0].address == module.get_parameter(name).data_ptr()


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_step_on_memory_that_is_stale_takes_no_gradient(shard_optimizer):
    with open_mesh(2) as mesh:
        replicas = [torch.nn.Linear(2, 2) for _ in range(2)]
        step = gr.SyncStep(
            gr.torch.variables(replicas, mesh),
            gr.GradientDescentOptimizer(0.1),
            gr.AllReduceCrossDeviceOps(),
            shard_optimizer=shard_optimizer,
        )
        terms = [[[torch.ones(2, 2)], [torch.ones(2)]]] * 2
        step(terms)
        replicas[1].bias.data = torch.zeros(2)
        with pytest.raises(RuntimeError, match="'bias' was replaced or moved to other memory"):
            step(terms)
        assert [each.num_accumulated() for each in step.accumulators] == [0, 0]
        assert step.global_step == 1


def test_autograd_notices_what_an_update_writes():
    with open_mesh() as mesh:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        made = gr.torch.variables(module, mesh)
        loss = module(torch.ones(1, 2)).sum()
        made[2].numpy()  # a read does not count as a write
        loss.backward(retain_graph=True)
        gr.GradientDescentOptimizer(0.1).apply_gradients([(module[1].weight.grad, made[2])])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def errors():
    linear = torch.nn.Linear
    strided = linear(2, 3)
    strided.weight = torch.nn.Parameter(torch.ones(2, 3).t())
    images = torch.nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    overlapping = torch.nn.Sequential(linear(2, 2), linear(2, 2))
    overlapping[1].bias.data = overlapping[0].weight.data[1]
    return [
        (linear(2, 2), 2, ValueError, "1 modules for 2 devices: pass one for each"),
        ([linear(2, 2), linear(2, 3)], 2, ValueError, "replica 1 has .* where replica 0"),
        (strided, 1, ValueError, r"not contiguous, with strides \(1, 3\)"),
        (images, 1, ValueError, "call module.to.memory_format=torch.contig"),
        (overlapping, 1, ValueError, "'0.weight' and '1.bias' share memory"),
        (torch.nn.ReLU(), 1, ValueError, "has no parameter"),
        (torch.ones(2), 1, TypeError, "is not a torch.nn.Module"),
    ]


def test_what_cannot_be_shared_is_refused_by_name():
    for module, devices, error, match in errors():
        with open_mesh(devices) as mesh, pytest.raises(error, match=match):
            gr.torch.variables(module, mesh)


def test_meshes_that_cannot_share_are_refused():
    with pytest.raises(TypeError, match="is not a Mesh"):
        gr.torch.variables(torch.nn.Linear(2, 2), "sim")
    with open_mesh(schedule_seed=1) as mesh, pytest.raises(ValueError, match="has a schedule_seed"):
        gr.torch.variables(torch.nn.Linear(2, 2), mesh)
