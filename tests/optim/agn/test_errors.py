"""Errors name the argument, and nothing has changed."""

import re
from unittest.mock import Mock

import numpy as np
import pytest
from optim.agn.team import Own, Worker, pair

import gradreduce as gr
from gradreduce.errors import InvalidVariableError
from gradreduce.optim.agn.push import PushPlan

STARTS = {"t": np.ones((4, 2), "float32"), "v": np.ones(3, "float32")}
ONES = {name: np.ones_like(value) for name, value in STARTS.items()}


@pytest.fixture
def worker(mesh) -> Worker:
    """A worker in the middle of a period, with slots here and at the center."""
    made, _ = pair(mesh, 2, lambda: gr.MomentumOptimizer(0.5, 0.5), STARTS)
    for _ in range(3):
        made.step(ONES)
    return made


def test_a_constructors_arguments(mesh):
    getter = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
    rule = gr.GradientDescentOptimizer(0.5)
    wrapped = gr.AGNOptimizer(rule, 1, getter)
    for args, options, error, text in [
        (("sgd", 1, getter), {}, TypeError, "optimizer='sgd' must be an Optimizer of gradreduce"),
        ((wrapped, 1, getter), {}, TypeError, "must be an Optimizer of gradreduce other"),
        ((rule, 1, mesh), {}, TypeError, "is not an AGNCustomGetter"),
        ((rule, 0, getter), {}, ValueError, "num_worker=0 must be at least 1"),
        ((rule, 1.5, getter), {}, TypeError, "num_worker=1.5 must be an integer"),
        ((rule, 1, getter, 0), {}, ValueError, "communication_period=0 must be at least 1"),
        ((rule, 1, getter, -2), {}, ValueError, "communication_period=-2 must be at least 1"),
        ((rule, 1, getter, 2.5), {}, TypeError, "communication_period=2.5 must be an integer"),
        ((rule, 1, getter), {"name": ""}, ValueError, "Must specify the optimizer name"),
        ((rule, 1, getter), {"name": 3}, TypeError, "name=3 must be a string"),
        ((rule, 1, getter), {"distance_scale": 0}, ValueError, "distance_scale=0 must be above 0"),
        ((rule, 1, getter), {"distance_scale": float("nan")}, ValueError, "distance_scale=nan"),
        ((rule, 1, getter), {"distance_scale": 1e-50}, ValueError, "=1e-50 must be above 0 (at le"),
        ((rule, 1, getter), {"distance_scale": "far"}, TypeError, "distance_scale='far'"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            gr.AGNOptimizer(*args, **options)


def test_hyperparameters_are_set_on_the_inner_optimizer(worker):
    with pytest.raises(AttributeError, match="set learning_rate of its inner optimizer"):
        worker.optimizer.lr = 0.1
    with pytest.raises(AttributeError, match="AGNOptimizer has no attribute 'learning_rate': set"):
        worker.optimizer.learning_rate = 0.1


def test_a_center_has_one_rule(mesh):
    center = gr.AGNCenter(mesh)
    pair(mesh, 1, lambda: gr.MomentumOptimizer(0.5, 0.5), STARTS, 1, center=center)
    theirs = type("MomentumOptimizer", (gr.Optimizer,), {"_slot_names": ("momentum",)})
    brought = {
        "AdamOptimizer with ['m', 'v']": lambda: gr.AdamOptimizer(0.5),
        "MomentumOptimizer with ['momentum'] and masters":
            lambda: gr.MomentumOptimizer(0.5, 0.5, master_dtype="float32"),
        "Own with ['direction']": Own,
        "another MomentumOptimizer": lambda: theirs("mine"),
    }  # fmt: skip
    for text, make in brought.items():
        text = f"the center uses MomentumOptimizer with slots ['momentum']; this worker uses {text}"
        with pytest.raises(ValueError, match=re.escape(text)):
            pair(mesh, 1, make, STARTS, 1, center=center)
    nesterov = gr.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
    pair(mesh, 1, lambda: nesterov, STARTS, 1, center=center)


def refused(worker, error, text, pairs, **more):
    before = worker.everything()
    with pytest.raises(error, match=text):
        worker.optimizer.apply_gradients(pairs, **more)
    assert worker.everything() == before


def test_gradients_and_variables(mesh, worker):
    """Also if the call would have pushed."""
    table, var = worker.variables["t"], worker.variables["v"]
    alien = gr.Variable([1.0], "alien", device=mesh.devices[0])
    center, total = worker.getter.center_variable(var), worker.getter.accumulation(var)
    grad, rows = np.ones(3, "float32"), np.ones((2, 2), "float32")
    both = gr.PerReplica([grad, grad], devices=mesh.devices[:2])
    step = gr.Variable([1, 2], trainable=False, device=mesh.devices[0])
    other = gr.open_mesh(2, backend="sim")
    there = [each.upload(grad) for each in other]
    stranger = pair(other, 1, starts=STARTS, num=1)[0].variables["v"]
    for pairs, error, text in [
        ([], ValueError, "No variables provided."),
        ([(None, var), (None, table)], ValueError, "No gradients provided for any variable"),
        ([(grad, var), (grad, alien)], KeyError, "'alien' .* was not created by this AGN"),
        ([(grad, center)], KeyError, "was not created by this AGNCustomGetter"),
        ([(grad, total)], KeyError, "was not created by this AGNCustomGetter"),
        ([(grad, "v")], InvalidVariableError, "'v' is not a Variable"),
        ([(grad, var), (grad, var)], ValueError, "contains <Variable .* more than once"),
        ([grad], TypeError, "not a .gradient, variable. pair"),
        ([(np.ones(4, "float32"), var)], ValueError, r"gradient of .* is float32\[4\]"),
        ([(np.ones(3), var)], ValueError, r"float64\[3\]"),
        ([("x", var)], TypeError, "str is not an array"),
        ([(gr.IndexedSlices(rows, [0, 4]), table)], ValueError, "the gradient of .*4"),
        ([(gr.IndexedSlices(rows, [0, 1], (5, 2)), table)], ValueError, "dense_shape"),
        ([(both, var)], ValueError, "is on"),
        ([(var.buffers[0], var)], ValueError, "shares memory with a variable or slot"),
        ([(grad, var), (center.buffers[0], table)], ValueError, r"is float32\[3\]"),
        ([(total.buffers[0], var)], ValueError, "shares memory with a variable or slot"),
        ([(table.buffers[0], table)], ValueError, "shares memory with a variable or slot"),
        ([(there[0], var)], ValueError, "belongs to another mesh"),
        ([(gr.PerReplica(there, other), var)], ValueError, "is on sim:0, sim:1; it must be"),
        ([(there[0], stranger)], KeyError, "was not created by"),
    ]:  # fmt: skip
        refused(worker, error, text, pairs)
    good = [(grad, var)]
    refused(worker, TypeError, "global_step=3 is not a Variable", good, global_step=3)
    refused(worker, ValueError, "must hold one number", good, global_step=step)
    for deadline in (0, -1.0, "5", True):
        text = f"deadline={deadline!r} must be a number of seconds above 0"
        refused(worker, ValueError, text, good, deadline=deadline)
        for call in (worker.optimizer.state_dict, worker.getter.center.state_dict):
            with pytest.raises(ValueError, match=text):
                call(deadline=deadline)
    with pytest.raises(KeyError, match=r"'alien' .* was not created by"):
        worker.optimizer.prepare([alien])
    counter, local_step = gr.Variable(0, trainable=False, device=other), worker.optimizer.local_step
    other.close()
    refused(worker, RuntimeError, "was closed", good, global_step=counter)
    refused(worker, TypeError, "read-only", good, global_step=local_step)
    for only_read in (local_step, total):
        for change in (only_read.assign, only_read.assign_add):
            with pytest.raises(TypeError, match="is read-only"):
                change(1)
    assert worker.step(ONES) is True


def test_a_rule_that_raises_changes_nothing(mesh):
    """Neither at the worker nor, at the end of the period, at the center."""

    class FailsOnce(Own):
        fails = -1

        def _apply(self, variable, slots, gradient):
            type(self).fails -= 1
            if type(self).fails == 0:
                raise ArithmeticError("no")
            super()._apply(variable, slots, gradient)

    found = []
    for fails in (-1, 1, 2, 3, 4):
        (made,) = pair(mesh, 2, FailsOnce, STARTS, 1)
        for _ in range(3):
            made.step(ONES)
        FailsOnce.fails, before = fails, made.everything()
        if fails > 0:
            with pytest.raises(ArithmeticError, match="no"):
                made.step(ONES)
            if fails < 3:  # of the two variables of the worker
                assert made.everything() == before
        if fails < 3:
            assert made.step(ONES) is True
        made.step(ONES)
        found.append(made.everything())
    assert all(each == found[0] for each in found)


def test_empty_gradients_are_accepted(mesh):
    starts = {"none": np.zeros((0, 3), "float32"), "thin": np.zeros((4, 0), "float32"),
              "one": np.float32(1)}  # fmt: skip
    team = pair(mesh, 2, lambda: gr.MomentumOptimizer(0.5, 0.5), starts)
    rows = gr.IndexedSlices(np.zeros((2, 0), "float32"), [3, 3])
    for turn in range(4):
        did = team[0].step({"none": starts["none"], "thin": rows, "one": np.float32(1)})
        assert did is (turn % 2 == 1)
    assert team[0].local["none"].shape == (0, 3)
    team[0].optimizer.load_state_dict(team[0].optimizer.state_dict())
    team[0].getter.center.load_state_dict(team[0].getter.center.state_dict())


def test_iterators_tuples_and_nan_are_fine(worker):
    pairs = [(ONES[name], var) for name, var in worker.variables.items()]
    assert worker.optimizer.apply_gradients(iter(pairs)) is True
    assert worker.optimizer.apply_gradients(tuple(pairs[::-1])) is False
    worker.step({"v": np.array([1, np.nan, np.inf], "float32")})
    assert np.isnan(worker.center["v"]).tolist() == [False, True, False]
    assert np.isinf(worker.local["v"]).tolist() == [False, False, True]


def test_slots_are_those_of_the_inner_optimizer(mesh, worker):
    var = worker.variables["v"]
    center = worker.getter.center_variable(var)
    found = [worker.optimizer.get_slot(each, "momentum") for each in (var, center)]
    names = ["v/Momentum", "global_center_variable/v/Momentum"]
    assert [slot.name for slot in found] == names
    assert found[0] is worker.inner.get_slot(var, "momentum")
    assert worker.optimizer.get_slot(var, "nothing") is None
    assert worker.optimizer.get_slot_names() == ["momentum"]
    assert {slot.name for slot in found} <= {each.name for each in worker.optimizer.variables()}
    assert found[1] not in worker.getter.center.variables()
    assert worker.optimizer.get_name() == "AGNOptimizer"
    chosen = gr.HierarchicalCopyAllReduce(mesh=mesh)
    worker.optimizer.cross_device_ops = chosen
    assert worker.inner.cross_device_ops is worker.optimizer.cross_device_ops is chosen


@pytest.fixture
def alone(mesh) -> Worker:
    """A worker and its center on one device."""
    home = mesh.devices[1]
    make = lambda: gr.MomentumOptimizer(0.5, 0.5)  # noqa: E731
    return Worker(home, gr.AGNCenter(home), STARTS, make, 1, 2)


def test_freed_memory_may_be_reused_for_a_gradient(alone):
    """The memory of slots before a load, and of a sum that was converted to an array."""
    (home,) = alone.getter.devices

    def step_by_new_memory():
        kept = []
        for _ in range(6):
            kept.append({name: home.upload(value) for name, value in ONES.items()})
            alone.step(kept[-1])

    step_by_new_memory()
    alone.getter.center.load_state_dict(alone.getter.center.state_dict())
    step_by_new_memory()
    alone.step({"t": gr.IndexedSlices(ONES["t"][:2], [1, 2]), "v": ONES["v"]})
    alone.step(ONES)
    step_by_new_memory()


def test_the_sum_cannot_be_a_gradient_on_any_device(alone):
    for grad in (ONES["t"], gr.IndexedSlices(ONES["t"][:2], [1, 2]), ONES["t"], ONES["t"]):
        alone.step({"t": grad, "v": ONES["v"]})  # a sum of rows becomes an array, elsewhere
    alone.step(ONES)
    table, var = alone.variables.values()
    pairs = [(alone.getter.accumulation(table).buffers[0], table), (ONES["v"], var)]
    refused(alone, ValueError, "shares memory with a variable or slot", pairs)


def test_the_center_cannot_be_a_gradient_of_a_step_that_repeats_a_push(mesh, monkeypatch):
    """A repeated push writes the center before the step reads its gradients."""
    home = mesh.devices[0]
    worker = Worker(home, gr.AGNCenter(home), STARTS, lambda: gr.MomentumOptimizer(0.5, 0.5))
    with monkeypatch.context() as patch:
        patch.setattr(PushPlan, "__init__", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            worker.step(ONES)
    table, var = worker.variables.values()
    center = worker.getter.center_variable(table)
    for written in (center, worker.getter.center.slot(center, "momentum")):
        pairs = [(written.buffers[0], table), (ONES["v"], var)]
        refused(worker, ValueError, "shares memory with a variable or slot", pairs)
    assert worker.step(ONES) is True
