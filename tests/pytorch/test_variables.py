"""``gr.torch.variables``: Variables that share memory with a module's parameters."""

import numpy as np
import pytest
from support.libraries import torch

import gradreduce as gr

pytestmark = pytest.mark.torch


def net(dtype=None):
    """Two layers with integers; the second is frozen and has the bias of the first."""
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).to(dtype)
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.constant_(parameter, 1.0 + number)
    made[1].bias = made[0].bias
    made[1].weight.requires_grad_(False)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_variables_are_the_parameters_of_all_replicas(dtype, mesh):
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
def test_a_step_trains_replicas_with_the_bits_of_own_variables(shard_optimizer, mesh):
    torch.manual_seed(0)
    replicas = [torch.nn.Linear(5, 3) for _ in range(2)]
    replicas[1].load_state_dict(replicas[0].state_dict())
    own = [gr.Variable(each.detach().clone(), device=mesh) for each in replicas[0].parameters()]
    step, of_own = (
        gr.SyncStep(row, gr.AdamOptimizer(0.1), gr.AllReduceCrossDeviceOps(),
                    shard_optimizer=shard_optimizer)
        for row in (gr.torch.variables(replicas, mesh), own)
    )  # fmt: skip
    for _ in range(3):
        terms = []
        for replica in replicas:
            replica.zero_grad()
            replica(torch.randn(4, 5)).square().mean().backward()
            terms.append([[each.grad] for each in replica.parameters()])
        step(terms)
        of_own(terms)
    for replica in replicas:
        for parameter, variable in zip(replica.parameters(), own, strict=True):
            assert (parameter.detach().numpy() == variable.numpy()).all()
    replicas[1].bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match="'bias' was replaced or moved to other memory"):
        step(terms)
    assert [each.num_accumulated() for each in step.accumulators] == [0, 0]
    assert step.global_step == 3


def replaced(module):
    module[0].weight = torch.nn.Parameter(module[0].weight.detach().clone())


def untied(module):
    module[1].bias = torch.nn.Parameter(module[0].bias.detach().clone())


def assigned(module):
    state = {key: each.clone() for key, each in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


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
def test_no_use_of_a_variable_takes_memory_that_is_not_the_parameter_any_more(change, mesh):
    do, name = CHANGES[change]
    module = net()
    (variable,) = [each for each in gr.torch.variables(module, mesh[:1]) if each.name == name]
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
    (fresh,) = [each for each in gr.torch.variables(module, mesh[:1]) if each.name == name]
    assert fresh.buffers[0].address == module.get_parameter(name).data_ptr()


def test_autograd_notices_what_an_update_writes(mesh):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    made = gr.torch.variables(module, mesh[:1])
    loss = module(torch.ones(1, 2)).sum()
    made[2].numpy()  # a read does not count as a write
    loss.backward(retain_graph=True)
    gr.GradientDescentOptimizer(0.1).apply_gradients([(module[1].weight.grad, made[2])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_shared_is_refused_by_name(mesh):
    linear = torch.nn.Linear
    strided = linear(2, 3)
    strided.weight = torch.nn.Parameter(torch.ones(2, 3).t())
    images = torch.nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    overlapping = torch.nn.Sequential(linear(2, 2), linear(2, 2))
    overlapping[1].bias.data = overlapping[0].weight.data[1]
    one = mesh[:1]
    queued = gr.open_mesh(1, backend="sim", schedule_seed=1)
    for module, chosen, error, match in [
        (linear(2, 2), mesh, ValueError, "1 modules for 2 devices: pass one for each"),
        ([linear(2, 2), linear(2, 3)], mesh, ValueError, "replica 1 has .* where replica 0"),
        (strided, one, ValueError, r"not contiguous, with strides \(1, 3\)"),
        (images, one, ValueError, "call module.to.memory_format=torch.contig"),
        (overlapping, one, ValueError, "'0.weight' and '1.bias' share memory"),
        (torch.nn.ReLU(), one, ValueError, "has no parameter"),
        (torch.ones(2), one, TypeError, "is not a torch.nn.Module"),
        (linear(2, 2), "sim", TypeError, "is not a Mesh"),
        (linear(2, 2), queued, ValueError, "has a schedule_seed"),
    ]:
        with pytest.raises(error, match=match):
            gr.torch.variables(module, chosen)
    queued.close()
