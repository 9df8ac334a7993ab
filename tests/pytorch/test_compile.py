"""torch.compile: each call of this library in a compiled function is one graph break."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.libraries import torch
from support.processes import run

import gradreduce as gr
from gradreduce import hide_from_torch_compile

pytestmark = pytest.mark.torch


class Halving(gr.Optimizer):
    """A rule in Python, which would compute with tensors if torch.compile traced it."""

    def __init__(self):
        super().__init__("Halving")

    def _apply(self, variable, slots, gradient):
        variable -= np.divide(gradient, 2)


def around(call, arguments, state):
    """A function that computes before and after a call, and the state that the call changes."""

    def function(x):
        y = x * 2
        call(*arguments(y))
        return y * 3

    return function, state


def applied(rule):
    def make(mesh):
        variable = gr.Variable(np.ones(3, "f4"), "weight", device=mesh[0])
        optimizer = rule()
        optimizer.prepare([variable])
        return around(optimizer.apply_gradients, lambda y: ([(y, variable)],), variable.numpy)

    return make


def minimized(mesh):
    variable = gr.Variable(np.ones(3, "f4"), device=mesh[0])
    optimizer = gr.GradientDescentOptimizer(0.1)

    def loss():
        return np.square(variable).sum()

    return around(optimizer.minimize, lambda y: (loss,), variable.numpy)


def stepped(mesh):
    variable = gr.Variable(np.ones(3, "f4"), device=mesh)
    step = gr.SyncStep([variable], gr.AdamOptimizer(0.1), gr.AllReduceCrossDeviceOps())
    return around(step, lambda y: ([[[y]], [[y]]],), variable.numpy)


def torch_stepped(mesh):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.arange(3.0)
    net = torch.nn.ParameterList([parameter])
    optimizer = gr.torch.Optimizer(gr.AdamOptimizer(0.1), gr.torch.variables(net, mesh[:1]))
    return around(optimizer.step, lambda y: (), lambda: parameter.detach().numpy())


def zeroed(mesh):
    dp = gr.torch.DataParallel(torch.nn.Linear(3, 1), mesh[:1])
    dp(torch.ones(3)).sum().backward()
    return around(dp.zero_grad, lambda y: (), lambda: dp.module.weight.grad.clone().numpy())


def prepared(mesh):
    flat = mesh.flat_buffer([(3,)], "float32")
    step = flat.prepare_all_reduce(gr.ReduceOp.SUM)
    for (array,) in flat.arrays("torch"):
        array.copy_(array + 1)
    return around(step, lambda y: (), flat.views[0][0].numpy)


def accumulated(mesh):
    sums = gr.ConditionalAccumulator("float32", (3,), device=mesh[0])
    return around(sums.apply_grad, lambda y: (y,), lambda: sums.take_grad(1))


def assigned(mesh):
    variable = gr.Variable(np.ones(3, "f4"), device=mesh[0])
    return around(variable.assign, lambda y: (y,), variable.numpy)


def reduced(mesh):
    ops = gr.AllReduceCrossDeviceOps(mesh=mesh)
    return lambda x: ops.all_reduce([{"w": x * 2}, {"w": x}])[0]["w"] * 3, lambda: None


def plain(function):
    """A call whose result the function computes with."""
    return lambda mesh: (function, lambda: None)


CASES = {  # by the name in the error
    "all_reduce": lambda mesh: (
        lambda x: gr.all_reduce([[x * 2], [x]], mesh=mesh)[1][0] * 3,
        lambda: None,
    ),
    "AllReduceCrossDeviceOps.all_reduce": reduced,
    "add_n": plain(lambda x: gr.add_n([x * 2, x]) * 3),
    "accumulate_n": plain(lambda x: gr.accumulate_n([x * 2, x, x]) * 3),
    "aggregate": plain(lambda x: gr.aggregate([x * 2, x]) * 3),
    "clip_by_global_norm": plain(lambda x: gr.clip_by_global_norm([x * 2], 1.0)[0][0] * 3),
    "Optimizer.apply_gradients": applied(lambda: gr.AdamOptimizer(0.1)),
    "Optimizer.apply_gradients, a rule in Python": applied(Halving),
    "Optimizer.minimize": minimized,
    "SyncStep.__call__": stepped,
    "Optimizer.step": torch_stepped,
    "DataParallel.zero_grad": zeroed,
    "PreparedStep.__call__": prepared,
    "ConditionalAccumulator.apply_grad": accumulated,
    "Variable.assign": assigned,
}

PLAIN = ("all_reduce", "Optimizer.apply_gradients, a rule in Python", "SyncStep.__call__",
         "Optimizer.step", "PreparedStep.__call__")  # fmt: skip


@pytest.fixture
def compiler():
    """``torch._dynamo`` without compiled functions, and with its counters at zero."""
    from torch._dynamo import utils

    torch._dynamo.reset()
    utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in PLAIN else pytest.mark.exhaustive) for name in CASES],
)
def test_a_call_is_one_graph_break_with_the_results_of_eager_code(name, mesh, compiler):
    x, results = torch.tensor([1.0, -2.0, 0.5]), []
    function, state = CASES[name](mesh)
    wanted = function(x), state()
    function, state = CASES[name](mesh)
    found = compiler.explain(lambda x: results.append(function(x)))(x)
    assert (found.graph_count, found.graph_break_count, len(found.break_reasons)) == (2, 1, 1)
    frames = compiler.utils.counters["frames"]["total"]
    assert frames == 4  # two functions, before and after: nothing inside the call
    assert results[0].equal(wanted[0])
    assert np.array_equal(state(), wanted[1])
    compiler.reset()
    with pytest.raises(compiler.exc.Unsupported) as caught:
        torch.compile(function, backend="eager", fullgraph=True)(x)
    text = str(caught.value)
    assert f"<function {name.partition(',')[0]} at" in text
    assert "call it outside the compiled function, or compile without fullgraph=True" in text


def test_a_data_parallel_is_traced_with_its_module(mesh, compiler):
    rows, compiled_by = [], partial(torch.compile, backend="eager")
    for compiled in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        dp = gr.torch.DataParallel(net, mesh[:1])

        def train(x, dp=dp):
            (dp(x) * 2).sum().backward()  # backward alone is a graph break
            return x + 1

        run = compiled_by(dp, fullgraph=True) if compiled else dp
        for step in range(3):
            dp.zero_grad()
            run(torch.ones(2, 3) * step).sum().backward()
            (compiled_by(train) if compiled else train)(torch.ones(2, 3) + step)
            rows.append([each.grad.clone() for each in dp.parameters()])
    for eager, other in zip(rows[:3], rows[3:], strict=True):
        assert all(map(torch.equal, eager, other))


def test_a_changed_compiler_is_reported_in_a_warning(caplog):
    hide_from_torch_compile._hide(SimpleNamespace(trace_rules=SimpleNamespace()))
    assert "torch.compile traces calls of gradreduce, and may fail there" in caplog.text


ORDERS = {
    "first": "import gradreduce as gr, torch",
    "last": "import torch, torch._dynamo, gradreduce as gr",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ORDERS)
def test_the_compiler_may_be_imported_before_or_after_this_library(order):
    program = f"""
{ORDERS[order]}
import sys
finders = [type(each).__module__ for each in sys.meta_path]
assert finders.count("gradreduce.hide_from_torch_compile") == {int(order == "first")}
mesh = gr.open_mesh(1, backend="sim")
def f(x):
    return gr.add_n([x * 2, x], output_type="torch") * 3
from torch._dynamo import explain
found = explain(f)(torch.ones(3))
assert (found.graph_count, found.graph_break_count) == (2, 1), found
assert all(type(each).__module__ != "gradreduce.hide_from_torch_compile" for each in sys.meta_path)
"""
    done = run("none", 1, "-c", program)
    assert done.returncode == 0, done.text
