"""Errors of ``apply_gradients``, which are raised before anything changes."""

import numpy as np
import pytest
from optim.model import ones
from support.failing_operations import InjectedError, failing_at

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, InvalidVariableError


def test_calls_that_are_refused_change_nothing(mesh, model):
    """The invalid gradient comes last; the others are not applied, and no slots are made."""
    weights, *others = model.variables
    grad, pairs = ones(2, 3), model.pairs()
    spread, part = [grad] * len(mesh), mesh[1:]
    vector = gr.Variable([0, 0], trainable=False, device=mesh)
    shape, no_pair = "it must have the shape and dtype", r"not a \(gradient, variable\) pair"
    with gr.open_mesh(len(mesh), backend="sim") as other:
        gradients = [
            (ones(3, 2), ValueError, shape),
            (ones(6), ValueError, shape),
            (1.0, ValueError, shape),
            (ones(2, 3, dtype="float64"), ValueError, shape),
            (ones(2, 3, dtype="int32"), ValueError, shape),
            (np.ones((2, 3), bool), TypeError, "dtype bool cannot be added"),
            ([[1.0] * 3, [1j] * 3], ValueError, "cannot convert complex128 numbers"),
            ("grad", TypeError, "str is not an array"),
            (object(), TypeError, "object is not an array"),
            (gr.Variable(grad, device=mesh), TypeError, "Variable is not an array"),
            (gr.Mirrored([ones(3, 2)] * len(mesh), mesh), ValueError, shape),
            (gr.PerReplica([*spread[1:], ones(3, 2)], mesh), ValueError, shape),
            (gr.PerReplica([*spread[1:], ones(2, 3, dtype="float64")], mesh), ValueError, shape),
            *[(kind(*given), ValueError, "it must be on the variable's devices")
              for given in ((spread[1:], part), (spread, other))
              for kind in (gr.Mirrored, gr.PerReplica)],
            (other.devices[0].put(grad), ValueError, "belongs to another mesh"),
        ]  # fmt: skip
        cases = [([*zip(model.grads[1:], others, strict=True), (wrong, weights)], *error)
                 for wrong, *error in gradients]  # fmt: skip
        for wrong in ([1.0, 2.0], ([1.0],), ([1.0], None, None), None, 3, "gv"):
            cases += [([wrong], TypeError, no_pair), ([*pairs, wrong], TypeError, no_pair)]
        for wrong in (([1.0], None), ([1.0], np.ones(1)), (None, "w")):
            text = "is not a Variable"
            cases += [([wrong, *pairs], error, text) for error in (InvalidVariableError, TypeError)]
        cases += [(given, ValueError, r"^No variables provided\.$") for given in ([], (), iter([]))]
        cases += [([(each, weights) for each in given], ValueError, "more than once")
                  for given in ((grad, grad), (grad, None), (None, None))]  # fmt: skip
        cases += [([(None, var) for var in given], ValueError, "No gradients provided for any var")
                  for given in (model.variables, [weights])]  # fmt: skip
        before, fresh = model.state(), gr.MomentumOptimizer(1.0, 0.5)
        for given, error, text in cases:
            for optimizer in (model.optimizer, fresh):
                with pytest.raises(error, match=text):
                    optimizer.apply_gradients(given, model.step)
            assert model.state() == before, given
    for step, error in [(0, TypeError), (np.int64(0), TypeError), ("step", TypeError),
                        (vector, ValueError)]:  # fmt: skip
        with pytest.raises(
            error, match=r"^global_step=.*(is not a Variable|must hold one number)$"
        ):
            model.optimizer.apply_gradients(pairs, step)
    assert model.state() == before
    assert vector.numpy().tolist() == [0, 0]
    assert (fresh.variables(), fresh.get_slot_names()) == ([], [])
    assert issubclass(InvalidVariableError, ValueError)


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
    for given in (wrong, lambda: wrong, gr.Variable(np.float64(wrong), device=mesh)):
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
    spread = gr.PerReplica([device.put(np.ones(2, dtype)) for device in mesh.devices], mesh)
    before = model.state()
    own = Failing("own", master_dtype="float32")
    for optimizer in (model.optimizer, gr.GradientDescentOptimizer(1.0), own):
        for grad in (np.ones(2, dtype), spread):  # replicas are not reduced
            for pairs in (model.pairs(), []):
                with (
                    mesh.journal() as journal,
                    pytest.raises(InvalidVariableError, match=f"Invalid type {dtype} of .*counts"),
                ):
                    optimizer.apply_gradients([*pairs, (grad, counts)], model.step)
                assert journal.launches == journal.copies == 0
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


def test_the_memory_of_a_variable_cannot_be_a_gradient(mesh):
    """A launch reads gradients and writes variables in any order, so they must not overlap."""
    optimizer = gr.MomentumOptimizer(1.0, 0.5, master_dtype="float32")
    first, second = variables = [gr.Variable([1.0], device=mesh) for _ in range(2)]
    half = gr.Variable(ones(1, dtype="float16"), device=mesh)
    optimizer.apply_gradients([([1.0], first), ([1.0], second), ([1.0], half)])
    slots = [optimizer.get_slot(each, "momentum") for each in (second, half)]
    kept = [first, second, slots[0]]
    masters = optimizer.get_slot(half, "master").buffers[-1], slots[1].buffers[-1]
    calls = [[(each.view(0, (1,), half.dtype), half)] for each in masters]
    for each in kept:
        for grad in (each.buffers[-1], gr.Mirrored(each.buffers)):
            calls.append([(grad, first), ([1.0], second)])
    for pairs in calls:
        with pytest.raises(ValueError, match="shares memory with a variable or slot"):
            optimizer.apply_gradients(pairs)
    found = [buffer.numpy().tolist() for each in (*kept, half) for buffer in each.buffers]
    count = len(mesh)
    assert found == [[0.0]] * 2 * count + [[1.0]] * count + [[0.0]] * count
    plain = gr.GradientDescentOptimizer(0.5)
    first.assign([4.0])
    plain.apply_gradients([(first.buffers[0], second)])  # it is only read
    plain.apply_gradients([(gr.PerReplica(first.buffers), first)])  # reduced to new memory
    assert [var.numpy().tolist() for var in variables] == [[2.0], [-2.0]]


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


def test_mirrored_gradients_are_refused_after_the_first_update_too():
    """Then a plan of the variables exists, which looks at each copy."""
    with gr.open_mesh(2, backend="sim") as mesh:
        first, second = mesh
        homes = {"one": first, "two": second, "both": mesh}
        variables = [gr.Variable(ones(3), name, device=home) for name, home in homes.items()]
        own = [
            gr.Mirrored([ones(3)] * len(each.devices), devices=each.devices) for each in variables
        ]
        optimizer = gr.GradientDescentOptimizer(1.0)
        optimizer.apply_gradients(list(zip(own, variables, strict=True)))
        before = [each.numpy() for each in variables]
        near, far = first.put(ones(3)), second.put(ones(3))
        for grads, says in [
            ((own[2], near, far), "the gradient of .*one.* must be on the variable's devices"),
            (
                (own[0], own[1], gr.Mirrored(list(variables[2].buffers))),
                "the gradient of .*both.* shares",
            ),
        ]:
            with pytest.raises(ValueError, match=says):
                optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        for value, variable in zip(before, variables, strict=True):
            assert np.array_equal(variable.numpy(), value)
        optimizer.prepare(variables)
    with pytest.raises(BackendUnavailableError, match="was closed"):
        optimizer.prepare(variables)
