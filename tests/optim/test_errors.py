"""Errors of ``apply_gradients``, which are raised before anything changes."""

from __future__ import annotations

import numpy as np
import pytest
from optim.model import ones
from support.failing_operations import InjectedError, failing_at

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, InvalidVariableError


def test_nothing_to_do(model):
    before = model.state()
    for pairs in ([], (), iter([]), zip(strict=True)):
        with pytest.raises(ValueError, match=r"No variables provided\."):
            model.optimizer.apply_gradients(pairs, model.step)
    for variables in (model.variables, model.variables[:1]):
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            model.optimizer.apply_gradients([(None, var) for var in variables], model.step)
    assert model.state() == before


def test_a_variable_twice(model):
    before = model.state()
    variable = model.variables[0]
    for grads in ((ones(2, 3), ones(2, 3)), (ones(2, 3), None), (None, None)):
        with pytest.raises(ValueError, match="more than once"):
            model.optimizer.apply_gradients([(grad, variable) for grad in grads], model.step)
    assert model.state() == before


@pytest.mark.parametrize(
    ("pair", "error"),
    [
        ([1.0, 2.0], TypeError),
        (([1.0],), TypeError),
        (([1.0], None, None), TypeError),
        (None, TypeError),
        (3, TypeError),
        ("gv", TypeError),
        (([1.0], None), InvalidVariableError),
        (([1.0], np.ones(1)), InvalidVariableError),
        ((None, "w"), InvalidVariableError),
    ],
)
def test_invalid_pairs_are_refused(model, pair, error):
    before = model.state()
    for pairs in ([pair], [*model.pairs(), pair], [pair, *model.pairs()]):
        with pytest.raises(error) as caught:
            model.optimizer.apply_gradients(pairs, model.step)
        assert isinstance(caught.value, TypeError)
    assert issubclass(InvalidVariableError, ValueError)
    assert model.state() == before


def test_incompatible_gradients_are_refused(mesh, model):
    """The invalid gradient comes last; the others are not applied either."""
    before = model.state()
    fine = model.grads[1:]
    spread, part = [ones(2, 3)] * len(mesh), mesh[1:]
    with gr.open_mesh(len(mesh), backend="sim") as other:
        for grad, error in [
            (ones(3, 2), ValueError),
            (ones(6), ValueError),
            (1.0, ValueError),
            (ones(2, 3, dtype="float64"), ValueError),
            (ones(2, 3, dtype="int32"), ValueError),
            (np.ones((2, 3), bool), TypeError),
            ([[1.0] * 3, [1j] * 3], ValueError),
            ("grad", TypeError),
            (object(), TypeError),
            (gr.Variable(ones(2, 3), device=mesh), TypeError),
            (gr.Mirrored([ones(3, 2)] * len(mesh), mesh), ValueError),
            (gr.PerReplica([*spread[1:], ones(3, 2)], mesh), ValueError),
            (gr.PerReplica([*spread[1:], ones(2, 3, dtype="float64")], mesh), ValueError),
            (gr.PerReplica(spread[1:], part), ValueError),
            (gr.Mirrored(spread[1:], part), ValueError),
            (gr.Mirrored(spread, other), ValueError),
            (gr.PerReplica(spread, other), ValueError),
            (other.devices[0].put(ones(2, 3)), ValueError),
        ]:
            variables = [*model.variables[1:], model.variables[0]]
            with pytest.raises(error):
                pairs = zip([*fine, grad], variables, strict=True)
                model.optimizer.apply_gradients(pairs, model.step)
            assert model.state() == before, grad


def test_a_refused_call_makes_no_slots(mesh):
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    variables = [gr.Variable([1.0], device=mesh) for _ in range(2)]
    with pytest.raises(ValueError, match="is float64"):
        optimizer.apply_gradients(zip([ones(1), np.ones(1)], variables, strict=True))
    assert (optimizer.variables(), optimizer.get_slot_names()) == ([], [])


class Failing(gr.Optimizer):
    """An optimizer whose rule can be made to fail."""

    _slot_names = ("kept",)
    fails = True

    def _apply(self, variable, slots, gradient):
        if self.fails:
            raise InjectedError
        slots["kept"] += 1
        variable -= gradient


def failing():
    raise InjectedError


class Adam(gr.AdamOptimizer):
    fails = False  # which it is not asked for


def test_a_first_update_that_fails_leaves_no_slots(mesh):
    """If a callable or the rule fails; slots of other variables stay."""
    known, variable = (gr.Variable([1.0], device=mesh) for _ in range(2))
    for optimizer in (Adam(1.0, 0.0, 0.0, 0.0), Failing("own")):
        known.assign([1.0])
        variable.assign([1.0])
        optimizer.fails, optimizer.learning_rate = False, 1.0
        optimizer.apply_gradients([([1.0], known)])
        optimizer.fails, optimizer.learning_rate = True, failing
        before = optimizer.state_dict()
        for pairs in ([([1.0], variable)], [([1.0], known), ([1.0], variable)]):
            for _ in range(2):
                with pytest.raises(InjectedError):
                    optimizer.apply_gradients(pairs)
                assert optimizer.state_dict() == before
        optimizer.fails, optimizer.learning_rate = False, 1.0
        optimizer.apply_gradients([([1.0], variable)])
        assert [known.numpy(), variable.numpy()] == [0, 0]
        assert set(optimizer.state_dict()["slots"]) == {known.name, variable.name}


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("wrong", [1.0, 1.5, -0.1, float("nan")])
def test_an_invalid_decay_is_refused(mesh, name, wrong):
    """With a beta of one, Adam's correction would divide by zero."""
    message = f"{name}={wrong} must be at least 0 and below 1"
    with pytest.raises(ValueError, match=message):
        gr.AdamOptimizer(**{name: wrong})
    optimizer, variable = gr.AdamOptimizer(), gr.Variable([1.0], device=mesh)
    for given in (wrong, lambda: wrong):
        setattr(optimizer, name, given)
        with pytest.raises(ValueError, match=message):
            optimizer.apply_gradients([([1.0], variable)])
        assert (optimizer.get_slot_names(), optimizer.state_dict()["powers"]) == ([], None)
    with pytest.raises(ValueError, match=message):
        setattr(optimizer, name, wrong)
        gr.SyncStep([variable], optimizer, gr.AllReduceCrossDeviceOps(mesh=mesh))
    assert (optimizer.get_slot_names(), optimizer.state_dict()["powers"]) == ([], None)
    assert variable.numpy().tolist() == [1.0]


@pytest.mark.parametrize("dtype", ["int64", "int16", "complex64"])
def test_a_variable_that_holds_no_floats(mesh, model, dtype):
    """It may be passed with None, but not with a gradient."""
    counts = gr.Variable(np.zeros(2, dtype), "counts", trainable=False, device=mesh)
    before = model.state()
    own = Failing("own", master_dtype="float32")
    for optimizer in (model.optimizer, gr.GradientDescentOptimizer(1.0), own):
        for pairs in (model.pairs(), []):
            pairs = [*pairs, (np.ones(2, dtype), counts)]
            with pytest.raises(InvalidVariableError, match=f"Invalid type {dtype} of .*counts"):
                optimizer.apply_gradients(pairs, model.step)
        with pytest.raises(InvalidVariableError, match="Invalid type"):
            optimizer.prepare([counts])
        counts.trainable = True  # says so, but is not
        with pytest.raises(InvalidVariableError, match="Invalid type"):
            optimizer.apply_gradients([(np.ones(2, dtype), counts)])
        counts.trainable = False
    assert model.state() == before
    assert own.variables() == []
    assert not counts.numpy().any()
    model.optimizer.apply_gradients([*model.pairs(), (None, counts)])
    assert model.state() != before, "the devices live"


def test_a_wrong_global_step_changes_nothing(mesh, model):
    before = model.state()
    vector = gr.Variable([0, 0], trainable=False, device=mesh)
    for step, error in [(0, TypeError), (np.int64(0), TypeError), ("step", TypeError),
                        (vector, ValueError)]:  # fmt: skip
        with pytest.raises(error, match="global_step"):
            model.optimizer.apply_gradients(model.pairs(), step)
    assert model.state() == before
    assert vector.numpy().tolist() == [0, 0]


def test_the_memory_of_a_variable_cannot_be_a_gradient(mesh):
    """A launch reads gradients and writes variables in any order, so they must not overlap."""
    first, second = variables = [gr.Variable([1.0], device=mesh) for _ in range(2)]
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    optimizer.apply_gradients(zip([[1.0], [1.0]], variables, strict=True))
    slot = optimizer.get_slot(second, "momentum")
    for buffers in (first.buffers, second.buffers, slot.buffers):
        for grad in (buffers[-1], gr.Mirrored(buffers)):
            with pytest.raises(ValueError, match="shares memory with a variable or slot"):
                optimizer.apply_gradients([(grad, first), ([1.0], second)])
    values = [buffer.numpy().tolist() for var in variables for buffer in var.buffers]
    assert values == [[0.0]] * (2 * len(mesh))
    plain = gr.GradientDescentOptimizer(0.5)
    first.assign([4.0])
    plain.apply_gradients([(first.buffers[0], second)])  # it is only read
    plain.apply_gradients([(gr.PerReplica(first.buffers), first)])  # reduced to new memory
    assert [var.numpy().tolist() for var in variables] == [[2.0], [-2.0]]


def test_a_slot_of_an_earlier_step_cannot_be_a_gradient(mesh):
    """For other variables than in the last step, and with a master."""
    first, second = (gr.Variable(ones(1, dtype="float16"), device=mesh) for _ in range(2))
    optimizer = gr.AdagradOptimizer(1.0, master_dtype="float32")
    plain = gr.Variable([1.0], device=mesh)
    optimizer.apply_gradients(
        [(ones(1, dtype="float16"), first), (ones(1, dtype="float16"), second), ([1.0], plain)]
    )
    slot = optimizer.get_slot(plain, "accumulator")
    before = [each.numpy().tolist() for each in (plain, slot)]
    with pytest.raises(ValueError, match="shares memory with a variable or slot"):
        optimizer.apply_gradients([(slot.buffers[0], plain)])
    master = optimizer.get_slot(first, "master").buffers[-1].view(0, (1,), first.dtype)
    with pytest.raises(ValueError, match="shares memory with a variable or slot"):
        optimizer.apply_gradients([(master, first)])
    assert [each.numpy().tolist() for each in (plain, slot)] == before


@pytest.mark.parametrize("method", ["_launch", "_allocate"])
def test_a_failure_before_the_first_launch_changes_nothing(mesh, model, method):
    before = model.state()
    spread = gr.PerReplica([ones(2, 3)] * len(mesh), mesh)
    with failing_at(mesh.devices, 1, [method]), pytest.raises(InjectedError):
        model.optimizer.apply_gradients(model.pairs(spread, *model.grads[1:]), model.step)
    assert model.state() == before


def test_a_closed_mesh_raises():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable([1.0], device=mesh)
    with pytest.raises(BackendUnavailableError):
        gr.MomentumOptimizer(1.0, 0.5).apply_gradients([(ones(1), variable)])


def test_a_variable_that_holds_no_floats_is_refused_before_replicas_are_reduced(mesh):
    counts = gr.Variable(np.zeros(2, "int64"), "counts", trainable=False, device=mesh)
    spread = gr.PerReplica([device.put(np.ones(2, "int64")) for device in mesh.devices], mesh)
    with mesh.journal() as journal, pytest.raises(InvalidVariableError, match="Invalid type int64"):
        gr.GradientDescentOptimizer(1.0).apply_gradients([(spread, counts)])
    assert journal.launches == journal.copies == 0
