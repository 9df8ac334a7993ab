"""Random losses: gradients of every method equal those of HIPS autograd."""

import numpy as np
import pytest
from support.libraries import autograd, hips
from support.meshes import mesh_of

import gradreduce as gr

DESCENT = gr.GradientDescentOptimizer(1.0)
SHAPES = [(3,), (2, 3), (1, 3), ()]
UNARY = [
    lambda np, x: np.tanh(x), lambda np, x: np.sin(x) + x, lambda np, x: x * 0.5,
    lambda np, x: np.exp(-np.square(x)), lambda np, x: np.mean(x, keepdims=True) + x,
    lambda np, x: np.maximum(x, 0.1) * x, lambda np, x: x[..., ::-1] if x.ndim else -x,
    lambda np, x: np.sum(x) * np.cos(x), lambda np, x: np.reshape(x, (-1,))[:1] * 2,
]  # fmt: skip
# Operands of where() are not broadcast, because HIPS does not sum over broadcast axes there.
BINARY = [
    lambda np, x, y: x + y, lambda np, x, y: x * y, lambda np, x, y: x - 2 * y,
    lambda np, x, y: x / (1.5 + np.square(y)), lambda np, x, y: np.where(x > y, x + y, x * y),
    lambda np, x, y: np.tensordot(x, y, 0).sum() * x if x.size < 7 else x,
]  # fmt: skip


def program(seed):
    """A loss of three operands, in which values are used several times."""

    def loss(np, *operands):
        rng = random(seed)
        values = list(operands)
        for _ in range(18):
            x, y = (values[int(rng.integers(len(values)))] for _ in range(2))
            steps = [*UNARY, *BINARY]
            step = steps[int(rng.integers(len(steps)))]
            made = step(np, x) if step in UNARY else step(np, x, y)
            values.append(np.tanh(made))
        chosen = [values[int(rng.integers(len(values)))] for _ in range(3)]
        return sum(np.sum(each * (place + 1.0)) for place, each in enumerate(chosen)) + np.sum(
            values[-1]
        )

    return loss


def random(seed):
    """Random numbers; not NumPy's module, which a program replaces."""
    return np.random.default_rng(seed)


mesh = mesh_of([0, 0], scope="module", strict=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_loss_is_differentiated_as_by_hips(mesh, seed):
    rng = random(seed + 1000)
    operands = [rng.uniform(-1.5, 1.5, SHAPES[int(rng.integers(4))]) for _ in range(3)]
    variables = [gr.Variable(x, device=mesh) for x in operands]
    loss = program(seed)
    wanted = autograd.grad(lambda *xs: loss(hips, *xs), (0, 1, 2))(*operands)
    for method in gr.AggregationMethod:
        pairs = DESCENT.compute_gradients(
            lambda: loss(np, *[v.read() for v in variables]), variables, aggregation_method=method
        )
        for (gradient, _), right in zip(pairs, wanted, strict=True):
            left = np.zeros_like(right) if gradient is None else gradient
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)
