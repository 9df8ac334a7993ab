"""Every optimizer against a model in float64, through steps of every kind in a random order."""

from __future__ import annotations

import numpy as np
import pytest

import gradreduce as gr

SHAPE, NUM_STEPS = (7, 3), 12
B1, B2, DECAY, MU, EPSILON = 0.8, 0.95, 0.7, 0.3, 1e-3
WEIGHT_DECAY = 0.3

# The formulas of textbooks, not those of the kernels. Each takes the learning rate, the number of
# the step, the gradient, the variable and its slots (of the rows that change); returns new values.


def sgd(rate, step, grad, var):
    return [var - rate * grad]


def momentum(rate, step, grad, var, mom):
    return [var - rate * (MU * mom + grad), MU * mom + grad]


def nesterov(rate, step, grad, var, mom):
    return [var - rate * (grad * (1 + MU) + MU * MU * mom), MU * mom + grad]


def adam(rate, step, grad, var, mom, square):
    mom, square = B1 * mom + (1 - B1) * grad, B2 * square + (1 - B2) * grad**2
    scale = rate * np.sqrt(1 - B2**step) / (1 - B1**step)
    return [var - scale * mom / (np.sqrt(square) + EPSILON), mom, square]


def adamw(rate, step, grad, var, mom, square):
    mom, square = B1 * mom + (1 - B1) * grad, B2 * square + (1 - B2) * grad**2
    ratio = mom / (1 - B1**step) / (np.sqrt(square / (1 - B2**step)) + EPSILON)
    return [var - rate * (ratio + WEIGHT_DECAY * var), mom, square]


def lion(rate, step, grad, var, mom):
    sign = np.sign(B1 * mom + (1 - B1) * grad)
    return [var - rate * (sign + WEIGHT_DECAY * var), B2 * mom + (1 - B2) * grad]


def adagrad(rate, step, grad, var, total):
    return [var - rate * grad * (total + grad**2) ** -0.5, total + grad**2]


def rmsprop(rate, step, grad, var, square, mom):
    square = DECAY * square + (1 - DECAY) * grad**2
    mom = MU * mom + rate * grad * (square + EPSILON) ** -0.5
    return [var - mom, square, mom]


def rmsprop_centered(  # operands
    rate, step, grad, var, square, mean, mom
):
    square, mean = DECAY * square + (1 - DECAY) * grad**2, DECAY * mean + (1 - DECAY) * grad
    mom = MU * mom + rate * grad * (square - mean**2 + EPSILON) ** -0.5
    return [var - mom, square, mean, mom]


RULES = {
    "sgd": (sgd, lambda **more: gr.GradientDescentOptimizer(0.1, **more), {}),
    "momentum": (momentum, lambda **more: gr.MomentumOptimizer(0.1, MU, **more), {"momentum": 0}),
    "nesterov": (nesterov, lambda **more: gr.MomentumOptimizer(0.1, MU, use_nesterov=True, **more),
                 {"momentum": 0}),
    "adam": (adam, lambda **more: gr.AdamOptimizer(0.1, B1, B2, EPSILON, **more),
             {"m": 0, "v": 0}),
    "lazy adam": (adam, lambda **more: gr.AdamOptimizer(0.1, B1, B2, EPSILON, lazy=True, **more),
                  {"m": 0, "v": 0}),
    "adamw": (adamw, lambda **more: gr.AdamWOptimizer(0.1, B1, B2, EPSILON, WEIGHT_DECAY, **more),
              {"m": 0, "v": 0}),
    "lion": (lion, lambda **more: gr.LionOptimizer(0.1, B1, B2, WEIGHT_DECAY, **more), {"m": 0}),
    "adagrad": (adagrad, lambda **more: gr.AdagradOptimizer(0.1, **more), {"accumulator": 0.1}),
    "rmsprop": (rmsprop, lambda **more: gr.RMSPropOptimizer(0.1, DECAY, MU, EPSILON, **more),
                {"rms": 1, "momentum": 0}),
    "rmsprop centered": (
        rmsprop_centered,
        lambda **more: gr.RMSPropOptimizer(0.1, DECAY, MU, EPSILON, centered=True, **more),
        {"rms": 1, "mg": 0, "momentum": 0}),
}  # fmt: skip
# dtype, master -> the error that a step may add, for numbers near 1
PRECISIONS = {
    "float64": (np.float64, {}, 2.0**-49),
    "float32": (np.float32, {}, 2.0**-20),
    "half with a master": (np.float16, {"master_dtype": "float32"}, 2.0**-20),
}


def exact(rng, shape, num_replicas, dtype):
    """Values with exact sums and means, also in 16 bits."""
    return (rng.integers(-4, 5, shape) * num_replicas / 4).astype(dtype)


def rows_of(rng, num_replicas, dtype):
    """Rows of a gradient, some with the same index, and their sum as a whole array."""
    indices = rng.integers(0, SHAPE[0], rng.integers(1, 6))
    values = exact(rng, (len(indices), SHAPE[1]), num_replicas, dtype)
    whole = np.zeros(SHAPE)
    np.add.at(whole, indices, values.astype(np.float64))
    return gr.IndexedSlices(values, indices), whole, set(indices.tolist())


def step_of(rng, mesh, dtype):
    """A gradient of some type, the same as a whole array, and its rows."""
    kind, num_replicas = rng.integers(0, 5), len(mesh)
    if kind == 0:
        parts = [rows_of(rng, num_replicas, dtype)]
        given = parts[0][0]
    elif kind == 1:
        parts = [rows_of(rng, num_replicas, dtype)] * num_replicas
        given = gr.Mirrored([part for part, _, _ in parts], mesh)
    elif kind == 2:
        parts = [rows_of(rng, num_replicas, dtype) for _ in range(num_replicas)]
        given = gr.PerReplica([part for part, _, _ in parts], mesh)
    else:
        dense = exact(rng, (num_replicas, *SHAPE), num_replicas, dtype)
        given = gr.PerReplica(list(dense), mesh) if kind == 3 else dense[0]
        whole = dense.astype(np.float64)
        return given, whole.mean(0) if kind == 3 else whole[0], range(SHAPE[0])
    mean = np.mean([whole for _, whole, _ in parts], axis=0)
    return given, mean, sorted(set.union(*(rows for _, _, rows in parts)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rule", RULES)
def test_steps_of_every_kind_in_a_random_order(mesh, rule, precision):
    formula, make, starts = RULES[rule]
    dtype, more, bound = PRECISIONS[precision]
    rng = np.random.default_rng(len(rule) + len(mesh))
    optimizer, values = make(**more), rng.normal(size=SHAPE).astype(dtype)
    variable = gr.Variable(values, device=mesh)
    state = [
        values.astype(np.float64),
        *(np.full(SHAPE, start, float) for start in starts.values()),
    ]
    names = ["master" if more else None, *starts]
    for step in range(1, NUM_STEPS + 1):
        rate = rng.uniform(0.01, 0.1)
        optimizer.learning_rate = rate if step % 2 else lambda: rate  # noqa: B023  # asked now
        given, whole, rows = step_of(rng, mesh, dtype)
        optimizer.apply_gradients([(given, variable)])
        if "m" in starts and "lazy" not in rule:
            rows = range(SHAPE[0])  # the moments of all rows decay
        old = [array[list(rows)] for array in state]
        for array, new in zip(state, formula(rate, step, whole[list(rows)], *old), strict=True):
            array[list(rows)] = new
        for name, array in zip(names, state, strict=True):
            slot = variable if name is None else optimizer.get_slot(variable, name)
            for buffer in slot.buffers:
                error = np.abs(buffer.numpy() - array) / np.maximum(1, np.abs(array))
                assert error.max() <= step * bound, (step, name)
