"""Modules and ``named_parameters()`` as gradients, and the names of their parameters."""

import re

import numpy as np
import pytest
from support.libraries import torch
from support.thread_group import run_processes
from support.torch_layers import open_mesh

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError

pytestmark = pytest.mark.torch
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.fixture
def ops(mesh):
    return gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)


def models(count=2):
    """Modules whose gradients all equal the number of the replica; the last bias is frozen."""
    made = [torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)) for _ in range(count)]
    for replica, each in enumerate(made):
        each[1].bias.requires_grad_(False)
        for parameter in each.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, float(replica))
    return made


def gradients(module):
    return {
        name: None if each.grad is None else each.grad.tolist()
        for name, each in module.named_parameters()
    }


def test_modules_stand_for_their_gradients_by_name(ops):
    given = models()
    before = [gradients(each) for each in given]
    found = ops.all_reduce(given, MEAN)
    assert [gradients(each) for each in given] == before
    for each in found:
        assert tuple(each) == NAMES and each["1.bias"] is None
        assert each["0.weight"].tolist() == [[0.5, 0.5]] * 3 and each["1.weight"].shape == (1, 3)
    for other in (
        [each.named_parameters() for each in given],
        [list(each.named_parameters()) for each in given],
        [given[0], given[1].named_parameters()],
    ):
        again = ops.all_reduce(other, MEAN)
        assert all(each["0.bias"].tolist() == [0.5] * 3 for each in again)
    nested = ops.all_reduce([{"encoder": each, "scale": np.ones(2)} for each in given], SUM)
    assert nested[1]["encoder"]["0.bias"].tolist() == [1.0] * 3
    assert nested[1]["scale"].tolist() == [2.0, 2.0]


def test_the_gradients_of_modules_are_reduced_in_place(mesh, ops):
    given = models()
    memory = [each[0].weight.grad.data_ptr() for each in given]
    replicas = torch.nn.ModuleList(given)  # such as those of a DataParallel
    assert ops.all_reduce(replicas, MEAN, out=replicas) is replicas
    assert mesh.flight_record()[-1].tensors == "pack 1 of 1 (tensors 0.weight, 0.bias, 1.weight)"
    assert [each[0].weight.grad.data_ptr() for each in given] == memory
    assert gradients(given[0]) == gradients(given[1])
    assert given[0][1].weight.grad.tolist() == [[0.5] * 3] and given[0][1].bias.grad is None
    given = models()
    pairs = ops.pairs(given)
    assert ops.plan(MEAN, pairs).names == NAMES[:3]
    step = ops.prepare(MEAN, pairs, out=[value for value, _ in pairs])
    for replica, each in enumerate(given):
        each[0].weight.grad.fill_(4.0 * replica)
    step()
    assert given[1][0].weight.grad.tolist() == [[2.0, 2.0]] * 3


def test_errors_name_the_parameter(mesh, ops):
    without, other, fewer = models(), models(), models()
    without[1][0].bias.grad = None
    other[1][0] = torch.nn.Linear(2, 4)
    other[1][0].weight.grad = torch.ones(4, 2)
    other[1][0].bias.grad = torch.ones(4)
    fewer[1] = torch.nn.Linear(2, 3)
    lone, twice = models()[0], [[*each.named_parameters()] * 2 for each in models()]
    for given, error, text in [
        (without, ValueError, r"^grads\[1\]\['0.bias'\] is None, but grads\[0\]\['0.b"),
        (other, ValueError, r"^grads\[1\]\['0.weight'\] is float32\[4, 2\], grads\[0\]\['0.weight'"
         r"\] is float32\[3, 2"),
        (fewer, ValueError, r"it lacks '0.weight', .* it has also 'weight', 'bias'$"),
        (lone, ValueError, r"^grads must be a list or tuple .*, not Sequential"),
        (twice, ValueError, r"^grads\[0\] has two parameters named '0.weight': pass "),
        *[([pairs, pairs], TypeError, r"^grads\[0\] is an iterator or list of .*: pass a Py")
          for pairs in (lone.parameters(), iter({"a": torch.ones(2)}.items()), [("a", 1.0)])],
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            ops.all_reduce(given)
    assert mesh.flight_record() == []


# -- flat buffers ---------------------------------------------------------------------------------


def flat_of(mesh, given):
    return mesh.flat_buffer([each.shape for each in given[0].parameters()], "float32")


def test_attached_modules_name_the_tensors_of_a_step(mesh, ops):
    given = models()
    for make in (list, lambda each: [module.named_parameters() for module in each]):
        flat = flat_of(mesh, given)
        flat.attach(make(given))
        assert tuple(flat.names) == NAMES
        step = flat.prepare_all_reduce(MEAN, cross_device_ops=ops)
        step()
        assert mesh.flight_record()[-1].tensors == f"pack 1 of 1 (tensors {', '.join(NAMES)})"
        assert given[0][0].weight.grad.tolist() == [[0.5, 0.5]] * 3
        given[1][0].bias.data = given[1][0].bias.data.double()
        given[1][0].bias.grad = None
        with pytest.raises(ValueError, match=r"^parameters\[1\]\['0.bias'\] is float64\[3\], but"):
            step()
        given = models()


def test_what_cannot_be_attached_is_named(mesh):
    given = models()
    flat = flat_of(mesh, given)
    pairs = [list(each.named_parameters()) for each in given]
    with pytest.raises(ValueError, match=r"^parameters\[1\] has '1.bias' where .* has '0.weight'"):
        flat.attach([pairs[0], pairs[1][::-1]])
    pairs[1][2] = ("1.weight", pairs[1][2][1] * 2)
    with pytest.raises(ValueError, match=r"^parameters\[1\]\['1.weight'\] is computed from other"):
        flat.attach(pairs)
    assert flat.names == []
    flat.attach([each.parameters() for each in given])
    assert flat.names == []


# -- steps ----------------------------------------------------------------------------------------


def test_a_step_takes_modules(mesh, ops):
    given = models()
    for each in given:
        torch.nn.init.zeros_(each[0].weight), torch.nn.init.zeros_(each[1].weight)
    variables = [each for each in gr.torch.variables(given, mesh) if each.trainable]
    step = gr.SyncStep(variables, gr.GradientDescentOptimizer(2.0), ops)
    assert step(torch.nn.ModuleList(given)) and step([each.named_parameters() for each in given])
    assert [each[1].weight.tolist() for each in given] == [[[-2.0] * 3]] * 2
    assert "pack 1 of 1 (tensors 0.weight, 0.bias, 1.weight)" in {
        each.tensors for each in mesh.flight_record()
    }
    given[1][1].bias.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"^terms\[1\] has other .*: it has also '1.bias'$"):
        step(given)


def test_the_buckets_of_a_data_parallel_name_their_parameters(mesh, ops):
    dp = gr.torch.DataParallel(models()[0], mesh, ops=ops)
    for _ in range(2):
        before = len(mesh.flight_record())
        for replica in dp.replicas:
            replica(torch.ones(1, 2)).sum().backward()
        tensors = [each.tensors for each in mesh.flight_record()[before:]]
        assert tensors[-1] == "pack 1 of 1 (tensors 1.weight, 0.bias, 0.weight)"


def test_processes_name_the_parameter_in_which_their_modules_differ():
    def made(group):
        layers = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 1 + group.rank)]
        gr.torch.DataParallel(torch.nn.Sequential(*layers), open_mesh(1, group))

    def reduced(group):
        (given,) = models(1)
        if group.rank:
            given[0].bias.grad = None
        gr.all_reduce([given], mesh=open_mesh(1, group))

    for call, text in (
        (made, "tensor 1.weight is float32[1, 3] in process 0, float32[2, 3] in process 1"),
        (reduced, "3 in process 0, 2 in process 1 (0.bias only in process 0)"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            run_processes(2, call)
