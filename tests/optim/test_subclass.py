"""A rule that a user has written: two methods, on plain arrays."""

import numpy as np
import pytest

import gradreduce as gr


class Lion(gr.Optimizer):
    """Uses the sign of a mean of gradients, with a slot that does not start at zero."""

    _slot_names = ("mean", "count")

    def __init__(self, rate, **more):
        super().__init__("Lion", **more)
        self.rate = rate
        self.fails_at = None
        self.shapes = []

    def _slot_start(self, name):
        return 4.0 if name == "count" else 0.0

    def _apply(self, variable, slots, gradient):
        self.shapes.append(variable.shape)
        slots["mean"] *= 0.5
        slots["mean"] += 0.5 * gradient
        slots["count"] += 1
        variable -= self.rate * np.sign(slots["mean"])
        if len(self.shapes) == self.fails_at:
            raise RuntimeError("planted")


def state(optimizer, *variables):
    kept = [each for var in variables for each in (var, *optimizer._slots.of(var))]
    return [buffer.numpy().tolist() for each in kept for buffer in each.buffers]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_two_hooks_make_an_optimizer(mesh, dtype):
    optimizer = Lion(0.25)
    variable = gr.Variable(np.zeros((2, 3), dtype), "w", device=mesh)
    alone = gr.Variable(np.ones(4, dtype), device=mesh.devices[1])
    step = gr.Variable(0, trainable=False, device=mesh)
    spread = [np.full((2, 3), place + 1, dtype) for place in range(len(mesh))]
    for _ in range(3):
        pairs = [(gr.PerReplica(spread, mesh), variable), (-np.ones(4, dtype), alone)]
        optimizer.apply_gradients(pairs, step)
    assert [buffer.numpy() for buffer in step.buffers] == [3] * len(mesh)
    assert all((buffer.numpy() == -0.75).all() for buffer in variable.buffers)
    assert (alone.numpy() == 1.75).all()
    count = optimizer.get_slot(variable, "count")
    assert all((buffer.numpy() == 7).all() for buffer in count.buffers)
    assert (optimizer.get_slot(alone, "mean").numpy() == -0.875).all()
    assert optimizer.get_slot_names() == ["count", "mean"]
    assert [each.name for each in optimizer.variables()][:1] == [f"{alone.name}/Lion"]


def test_an_error_in_a_hook_changes_nothing(mesh):
    optimizer = Lion(0.25)
    variables = [gr.Variable(np.ones(3, "float32"), device=mesh) for _ in range(3)]
    pairs = [(np.ones(3, "float32"), variable) for variable in variables]
    pairs.append(
        (
            gr.IndexedSlices(np.ones(1, "float32"), [2]),
            gr.Variable(np.ones(3, "float32"), device=mesh),
        )
    )
    optimizer.apply_gradients(pairs)
    before = state(optimizer, *(variable for _, variable in pairs))
    for fails_at in range(1, 4 * len(mesh) + 1):
        optimizer.shapes, optimizer.fails_at = [], fails_at
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.apply_gradients(pairs)
        assert state(optimizer, *(variable for _, variable in pairs)) == before
    optimizer.shapes, optimizer.fails_at = [], None
    optimizer.apply_gradients(pairs)  # nothing is lost
    assert sorted(optimizer.shapes) == [(1,)] * len(mesh) + [(3,)] * 3 * len(mesh)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_hook_that_writes_the_gradient_is_refused(mesh, is_sparse):
    """The gradient belongs to the caller, and other copies on the device use it."""

    class Halved(gr.Optimizer):
        def _apply(self, variable, slots, gradient):
            gradient *= 0.5
            variable -= gradient

    given, variable = np.ones(3, "float32"), gr.Variable(np.ones(3, "float32"), device=mesh)
    grad = gr.IndexedSlices(given, [0, 1, 2]) if is_sparse else given
    with pytest.raises(ValueError, match="read-only"):
        Halved("halved").apply_gradients([(grad, variable)])
    assert given.tolist() == [1, 1, 1]
    assert all((buffer.numpy() == 1).all() for buffer in variable.buffers)
    given[:] = 2  # the caller may overwrite it


def drops_slot(variable, slots, gradient):
    del slots["mean"]


def replaces_slot(variable, slots, gradient):
    slots["mean"] = slots["mean"] + gradient


def returns_the_value(variable, slots, gradient):
    return variable - gradient  # its author expected that this becomes the new value


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (drops_slot, ValueError, r"_apply replaced the array slots\['mean'\]"),
        (replaces_slot, ValueError, r"_apply replaced the array slots\['mean'\]"),
        (returns_the_value, ValueError, r"apply returned ndarray.* in place"),
        (None, NotImplementedError, "Wrong has no update rule: override _apply"),
    ],
)
def test_a_wrong_rule_changes_nothing(mesh, wrong, error, text):
    def apply(self, variable, slots, gradient):
        Lion._apply(self, variable, slots, gradient)
        return wrong(variable, slots, gradient)

    kind = type("Wrong", (Lion,) if wrong else (gr.Optimizer,), {"_apply": apply} if wrong else {})
    optimizer, variable = kind(0.25 if wrong else "wrong"), gr.Variable([1.0], device=mesh)
    for grad in ([1.0], gr.IndexedSlices(np.ones(1, "float32"), [0])):
        with pytest.raises(error, match=text):
            optimizer.apply_gradients([(grad, variable)])
    assert all((buffer.numpy() == 1).all() for buffer in variable.buffers)
    assert optimizer.get_slot_names() == []
