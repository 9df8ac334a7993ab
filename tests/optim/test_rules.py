"""The update rules against plain NumPy, one rounding for each operation, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from exact import FLOATS, random_data, same

import gradreduce as gr
from gradreduce.device import accumulate_dtype

RATE, DECAY = 0.1, 0.9  # neither is a float32


def sgd(var, mom, grad, wide):
    return var - grad * wide.type(RATE), mom


def momentum(var, mom, grad, wide):
    moved = mom * wide.type(DECAY) + grad
    return var - moved * wide.type(RATE), moved


def nesterov(var, mom, grad, wide):
    moved = mom * wide.type(DECAY) + grad
    step = grad * wide.type(RATE) + moved * (wide.type(RATE) * wide.type(DECAY))
    return var - step, moved


RULES = {
    "sgd": (sgd, lambda: gr.GradientDescentOptimizer(RATE)),
    "momentum": (momentum, lambda: gr.MomentumOptimizer(RATE, DECAY)),
    "nesterov": (nesterov, lambda: gr.MomentumOptimizer(RATE, DECAY, use_nesterov=True)),
}


@pytest.fixture(params=RULES)
def rule(request):
    """A rule in plain NumPy, and an optimizer of it."""
    reference, make = RULES[request.param]
    return reference, make()


def stepped(reference, state, grad):
    """Computed in the accumulate type, stored in the variable's."""
    dtype = grad.dtype
    wide = accumulate_dtype(dtype)
    with np.errstate(all="ignore"):
        moved = reference(*(array.astype(wide) for array in (*state, grad)), wide)
        return tuple(array.astype(dtype) for array in moved)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_four_steps(mesh, rule, dtype):
    reference, optimizer = rule
    shapes = [(3, 7), (), (257,)]
    start = [random_data(shape, dtype, seed=place) for place, shape in enumerate(shapes)]
    variables = [gr.Variable(values, device=mesh) for values in start]
    states = [(values, np.zeros_like(values)) for values in start]
    for turn in range(4):
        grads = [random_data(shape, dtype, seed=10 * turn + len(shape)) for shape in shapes]
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        states = [
            stepped(reference, state, grad) for state, grad in zip(states, grads, strict=True)
        ]
        for variable, (value, moment) in zip(variables, states, strict=True):
            assert all(same(buffer.numpy(), value) for buffer in variable.buffers)
            slot = optimizer.get_slot(variable, "momentum")
            if reference is not sgd:
                assert all(same(buffer.numpy(), moment) for buffer in slot.buffers)


def test_a_rate_may_change_between_steps(mesh):
    optimizer = gr.MomentumOptimizer(0.5, 0.0)
    variable = gr.Variable([1.0], device=mesh)
    optimizer.apply_gradients([(np.ones(1, "float32"), variable)])
    optimizer.learning_rate, optimizer.momentum = 0.25, 1.0
    optimizer.apply_gradients([(np.ones(1, "float32"), variable)])
    assert variable.numpy().tolist() == [0.0]
    plain = gr.GradientDescentOptimizer(np.float32(0.5))
    plain.apply_gradients([([1.0], variable)])
    plain.learning_rate = 2.0
    plain.apply_gradients([([1.0], variable)])
    assert variable.numpy().tolist() == [-2.5]


def test_nesterov_is_off_by_default():
    optimizer = gr.MomentumOptimizer(0.5, 0.9)
    assert optimizer.use_nesterov is False
    assert (optimizer.learning_rate, optimizer.momentum) == (0.5, 0.9)
    assert gr.MomentumOptimizer(1, 0, True, "mine").get_name() == "mine"


@pytest.mark.parametrize("wrong", [None, "fast", [0.1], gr.ReduceOp.SUM])
def test_a_rate_is_a_number(wrong):
    for make in (
        lambda: gr.GradientDescentOptimizer(wrong),
        lambda: gr.MomentumOptimizer(wrong, 0.9),
        lambda: gr.MomentumOptimizer(0.1, wrong),
    ):
        with pytest.raises((TypeError, ValueError)):
            make()
