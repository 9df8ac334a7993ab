"""``gr.torch.functional``: PyTorch modules that AGN workers train."""

import copy
import threading
from functools import partial

import numpy as np
import pytest
from support.libraries import torch
from support.meshes import mesh_of

import gradreduce as gr

pytestmark = pytest.mark.torch
BARRIER = threading.Barrier(2)
ALLOWED_S = 60.0


mesh = mesh_of(3)


def worker(module, devices, center, rule=None, num_worker=1, period=1):
    """A model and its optimizer, by plain gradient descent unless a rule is given."""
    getter = gr.AGNCustomGetter(devices, center=center)
    model = gr.torch.functional(module, getter)
    rule = rule or gr.GradientDescentOptimizer(1.0)
    return model, gr.AGNOptimizer(rule, num_worker, getter, communication_period=period)


def filled(module, *values):
    """The module, with one number in all elements of each parameter."""
    for parameter, value in zip(module.parameters(), values, strict=True):
        torch.nn.init.constant_(parameter, value)
    return module


def modules():
    """Name -> module and input: every way in which a module can use its parameters."""
    checkpoint = torch.utils.checkpoint.checkpoint

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.out = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
            self.out.weight = self.rows.weight

        def forward(self, x):
            return self.out(self.rows(x))

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(lambda h: self.two(h).tanh(), self.one(x), use_reentrant=False)

    def frozen():
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        net[0].weight.requires_grad_(False)
        return net

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    attention = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    # Variables are contiguous: another order of additions, which is exact.
    channels_last = filled(torch.nn.Conv2d(2, 2, 3), 2.0, 1.0).to(memory_format=torch.channels_last)
    return {
        "frozen": (frozen(), x),
        "tied": (Tied(), torch.tensor([1, 1, 3])),
        "checkpointed": (Checkpointed(), x),
        "statistics": (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), x),
        "recurrent": (torch.nn.LSTM(4, 2), x),
        "attention": (attention, x[None]),
        "parametrized": (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 2)), x),
        "half": (torch.nn.Linear(4, 2).bfloat16(), x.bfloat16()),
        "channels last": (channels_last, torch.arange(32.0).view(1, 2, 4, 4)),
        "compiled": (torch.compile(torch.nn.Linear(4, 2), backend="eager"), x),
    }


NAMES = (
    "frozen", "tied", "checkpointed", "statistics", "recurrent", "attention", "parametrized",
    "half", "channels last", "compiled",
)  # fmt: skip


def loss_of(module, x):
    torch.manual_seed(1)  # for dropout
    result = module(x)
    return (result[0] if isinstance(result, tuple) else result).square().sum()


@pytest.mark.whole_product
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_buffers_are_those_of_the_module(mesh, name):
    net, x = modules()[name]
    before = copy.deepcopy(net.state_dict())
    center = gr.AGNCenter(mesh[0])
    model, optimizer = worker(net, mesh[1], center)
    wanted = dict(net.named_parameters())
    assert [each.name for each in model.variables] == list(wanted)
    assert [each.trainable for each in model.variables] == [
        each.requires_grad for each in wanted.values()
    ]

    def loss_and_state():
        loss = loss_of(model, x)
        model.state_dict({each.name: np.zeros(each.shape, each.dtype) for each in model.variables})
        return loss  # backward does not see the zeros

    value, pairs = optimizer.compute_gradients(loss_and_state, return_loss=True)
    for key, tensor in net.state_dict().items():
        assert tensor.equal(before[key])  # its buffers too
    assert all(each.grad is None for each in net.parameters())
    loss = loss_of(net, x)
    loss.backward()
    assert value.equal(loss.detach())
    assert [variable for _, variable in pairs] == [v for v in model.variables if v.trainable]
    for gradient, variable in pairs:
        assert torch.equal(gradient, wanted[variable.name].grad)
    for key, tensor in model.state_dict().items():
        assert tensor.equal(net.state_dict()[key])  # statistics are those after one forward

    assert optimizer.apply_gradients(pairs)
    net.load_state_dict(model.state_dict())
    after = {key: each.clone() for key, each in net.state_dict().items()}
    assert not after[pairs[0][1].name].equal(before[pairs[0][1].name])
    model.variables[-1].assign(np.zeros(model.variables[-1].shape, model.variables[-1].dtype))
    net.load_state_dict(model.state_dict(center.values()))  # the pushed values, also if tied
    for key, tensor in net.state_dict().items():
        assert tensor.equal(after[key])


def test_a_period_has_these_numbers(mesh):
    """One worker: y = 2 * (1, 1) + 3; each gradient is (1, 1) and 1 times 4 rows."""
    net = filled(torch.nn.Linear(2, 1), 2.0, 3.0)
    center = gr.AGNCenter(mesh[0])
    model, optimizer = worker(net, mesh[1], center, period=2)
    x = torch.ones(4, 2)
    assert not optimizer.minimize(lambda: model(x).sum())
    assert model(x).tolist() == [[-5.0]] * 4  # -2, -2, -1
    assert not model(x).requires_grad
    assert center.values()["weight"].tolist() == [[2.0, 2.0]]
    assert optimizer.minimize(lambda: model(x).sum())
    assert center.values()["weight"].tolist() == [[-2.0, -2.0]]  # by the mean of both
    assert model.state_dict()["bias"].tolist() == [-1.0]  # pulled
    assert filled(net, 2.0, 3.0)(x).tolist() == [[7.0]] * 4


def test_workers_in_threads_call_one_module_at_the_same_time(mesh):
    class Meeting(torch.nn.Linear):
        def forward(self, x):
            BARRIER.wait(ALLOWED_S)  # both workers are inside
            result = super().forward(x)
            BARRIER.wait(ALLOWED_S)
            return result

    net, center = filled(Meeting(1, 1, bias=False), 5.0), gr.AGNCenter(mesh[0])
    found = {}

    def work(task):
        model, optimizer = worker(net, mesh[1 + task], center, num_worker=2, period=100)
        with optimizer.make_session_run_hook(task == 0, task, wait_timeout=ALLOWED_S):
            model.variables[0].assign([[float(task)]])
            x = torch.full((1, 1), 3.0 + task)
            found[task] = optimizer.compute_gradients(lambda: model(x), return_loss=True)

    for each in [center.start_worker(task, partial(work, task)) for task in range(2)]:
        each.join()
    assert [found[task][0].item() for task in range(2)] == [0.0, 4.0]
    assert [found[task][1][0][0].item() for task in range(2)] == [3.0, 4.0]
    assert net.weight.item() == 5.0


def test_each_replica_of_a_worker_has_its_buffers(mesh):
    net = filled(torch.nn.BatchNorm1d(1, momentum=1.0), 1.0, 0.0)
    model, optimizer = worker(net, mesh[1:3], gr.AGNCenter(mesh[0]))
    data = gr.PerReplica([torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]])], mesh[1:3])
    optimizer.minimize(lambda: model(data.get()).sum())
    means = []
    for replica in range(2):
        with gr.replica(replica):
            means.append(model.state_dict()["running_mean"].item())
    assert means == [2.0, 7.0]
    assert model.variables[1].numpy().tolist() == [-2.0]  # the mean of both replicas
    assert net.running_mean.item() == 0.0
    net = torch.nn.Sequential(filled(torch.nn.Linear(1, 8), 1.0, 1.0), torch.nn.Dropout(0.5))
    model, _ = worker(net.eval(), mesh[1], gr.AGNCenter(mesh[0]))
    x = torch.ones(1, 1)
    assert model(x).tolist() == [[2.0] * 8]  # the mode is that of the worker
    assert set(model.train()(x).flatten().tolist()) == {0.0, 4.0}
    assert model.eval()(x).tolist() == [[2.0] * 8]
    assert not net.training


def test_errors_create_nothing(mesh):
    center = gr.AGNCenter(mesh[0])
    getter = gr.AGNCustomGetter(mesh[1], center=center)
    net = torch.nn.Linear(2, 1)
    wrapped = gr.torch.DataParallel(torch.nn.Linear(2, 1), mesh[:1])
    for module, made_for, error, text in [
        ([net], getter, TypeError, f"module=[{net}] must be a torch.nn.Module"),
        (wrapped, getter, TypeError, "a DataParallel has replicas of its own: pass its .module"),
        (net, mesh, TypeError, "getter=<Mesh sim [0, 1, 2]> is not an AGNCustomGetter"),
        (torch.nn.ReLU(), getter, ValueError, "the module has no parameter"),
    ]:
        with pytest.raises(error) as caught:
            gr.torch.functional(module, made_for)
        assert str(caught.value) == text
    assert center.values() == {}
    model = gr.torch.functional(net, getter)
    assert repr(model) == "<functional Linear of 2 variables on sim:1>"
    with pytest.raises(ValueError, match="the getter has a variable 'weight' already: make a "):
        gr.torch.functional(net, getter)
    other = gr.AGNCustomGetter(mesh[2], center=center)
    with pytest.raises(ValueError, match=r"is float32\[1, 3\] at this worker, but float32\[1, 2\]"):
        gr.torch.functional(torch.nn.Linear(3, 1), other)
    with pytest.raises(TypeError, match=r"cannot be pickled or copied; call gr\.torch\.functional"):
        copy.deepcopy(model)
