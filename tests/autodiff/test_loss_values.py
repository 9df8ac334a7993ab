"""compute_gradients(return_loss=True)."""

import numpy as np
import pytest
from support.libraries import jax, jnp, torch

import gradreduce as gr


def test_the_value_of_the_loss_is_returned_too(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    value, pairs = optimizer.compute_gradients(lambda: np.sum(w * w), [w], return_loss=True)
    assert (type(value), value, pairs[0][0].tolist()) == (np.float32, 5.0, [2.0, 4.0])
    assert pairs[0][1] is w
    terms = (np.sum(w * number) for number in (1, 2))
    values, pairs = optimizer.compute_gradients(lambda: terms, [w], return_loss=True)
    assert (values, pairs[0][0].tolist()) == ([3.0, 6.0], [3.0, 3.0])
    value, _ = optimizer.compute_gradients(lambda: w, return_loss=True)
    alone = iter([np.float32(2)])
    assert optimizer.compute_gradients(lambda: alone, [w], return_loss=True)[0] == [2.0]
    optimizer.minimize(lambda: np.sum(w * w))
    assert value.tolist() == [1.0, 2.0]  # a copy
    constant = np.ones((), np.float32)

    def constants():
        for number in range(2):
            constant[...] = number
            yield constant

    assert optimizer.compute_gradients(constants, [w], return_loss=True)[0] == [0.0, 1.0]
    with pytest.raises(TypeError, match="return_loss=1"):
        optimizer.compute_gradients(lambda: np.sum(w), return_loss=1)


def test_replicas_of_a_worker_return_one_value_each(mesh):
    getter = gr.AGNCustomGetter(mesh)
    w = gr.get_variable("return_loss/w", initial_value=np.ones(2, "float32"), custom_getter=getter)
    optimizer = gr.AGNOptimizer(gr.GradientDescentOptimizer(0.5), 2, custom_getter=getter)
    values, pairs = optimizer.compute_gradients(lambda: np.sum(w * 3.0), [w], return_loss=True)
    assert (values, len(pairs[0][0])) == ([6.0] * len(mesh), len(mesh))


@pytest.mark.torch
def test_pytorch_losses_return_detached_copies(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    value, pairs = optimizer.compute_gradients(lambda: torch.sum(torch.square(w)), return_loss=True)
    assert (type(value), value.item(), value.requires_grad) == (torch.Tensor, 5.0, False)
    assert pairs[0][0].tolist() == [2.0, 4.0]
    value, _ = optimizer.compute_gradients(lambda: w.read("torch"), [w], return_loss=True)
    optimizer.minimize(lambda: np.sum(w * w), var_list=[w])
    assert value.tolist() == [1.0, 2.0]


@pytest.mark.jax
def test_jax_losses_return_arrays_of_jax(mesh):
    w = gr.Variable([1.0, 2.0], "w", dtype="float32", device=mesh)
    optimizer = gr.GradientDescentOptimizer(0.5)
    options = {"engine": "jax", "return_loss": True}
    value, pairs = optimizer.compute_gradients(
        lambda: w.read("jax") * 2, [w], grad_loss=np.array([1.0, 3.0]), **options
    )
    assert (isinstance(value, jax.Array), value.tolist()) == (True, [2.0, 4.0])
    assert pairs[0][0].tolist() == [2.0, 6.0]
    values, _ = optimizer.compute_gradients(
        lambda: (jnp.sum(w.read("jax")) * number for number in (1, 2)), [w], **options
    )
    assert [float(each) for each in values] == [3.0, 6.0]
    value, pairs = optimizer.compute_gradients(lambda: jnp.float32(4), [w], **options)
    assert (float(value), pairs[0][0]) == (4.0, None)
