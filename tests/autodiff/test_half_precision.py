"""Gradients in float16 and bfloat16: sums are computed in float32 and rounded once."""

import ml_dtypes
import numpy as np
import pytest

import gradreduce as gr
from gradreduce.autodiff import logsumexp, softmax_cross_entropy

ROWS = 5000  # more than float16 or bfloat16 can count to by ones
HALVES = [np.float16, ml_dtypes.bfloat16]


LOSSES = {
    "broadcast": (lambda x: np.sum(np.ones((ROWS, 3), x.dtype) + x, axis=1), (3,)),
    "gain": (lambda x: np.mean(np.ones((ROWS, 3), x.dtype) * x, axis=1), (3,)),
    "var": (lambda x: np.var(x), (ROWS,)),
    "cumsum": (lambda x: np.cumsum(x) * np.ones(ROWS, x.dtype), (ROWS,)),
    "logsumexp": (lambda x: logsumexp(x), (ROWS,)),
    "cross entropy": (lambda x: softmax_cross_entropy(x, np.array([7])), (1, ROWS)),
}


def gradient(loss, x, mesh):
    variable = gr.Variable(x, device=mesh.devices[0])
    ((found, _),) = gr.GradientDescentOptimizer(1.0).compute_gradients(lambda: loss(variable))
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_sums_are_added_in_float32(name, dtype, mesh):
    loss, shape = LOSSES[name]
    x = np.linspace(-0.5, 0.5, int(np.prod(shape))).reshape(shape).astype(dtype)
    found, wanted = (gradient(loss, made, mesh) for made in (x, x.astype(np.float32)))
    assert found.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    found, scale = found.astype(np.float32), np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=2 * eps, atol=4 * eps * scale)


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_operations_that_add_half_precision_values_use_float32(dtype):
    eps = float(ml_dtypes.finfo(dtype).eps)
    zeros = np.zeros((ROWS, 2), dtype)
    for made in (
        logsumexp(zeros, axis=0),
        softmax_cross_entropy(np.zeros((1, ROWS), dtype), np.array([0])),
    ):
        assert made.dtype == dtype
        np.testing.assert_allclose(made.astype(np.float32), np.log(ROWS), rtol=eps)


def test_products_of_the_factors_beside_a_zero_may_overflow_float16(mesh):
    x = np.array([0.0, 300.0, 300.0, 2**-10], np.float16)
    assert gradient(np.prod, x, mesh).tolist() == [87.875, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_products_of_any_axes(dtype, mesh):
    """``np.einsum`` does not support these in bfloat16."""
    x = np.arange(6, dtype=dtype).reshape(1, 3, 2)
    other = np.ones((2, 1, 4, 3), dtype)
    found = gradient(lambda x: np.tensordot(x, other, ([1, 2], [3, 0])), x, mesh)
    assert (found.dtype, found.tolist()) == (dtype, np.full(x.shape, 4).tolist())
