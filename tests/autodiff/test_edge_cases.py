"""Points without a derivative, infinities, NaN, invalid classes, and sums of half precision."""

import ml_dtypes
import numpy as np
import pytest
from support.gradients import gradients

import gradreduce as gr
from gradreduce.autodiff import logsumexp, softmax_cross_entropy
from gradreduce.errors import InvalidArgumentError


def test_gradients_at_ties(v):
    assert gradients(lambda: np.sum(np.maximum(v, v * 1)))[0].tolist() == [1.0] * 3
    assert gradients(lambda: np.sum(np.minimum(2.0, v)))[0].tolist() == [1.0, 0.0, 0.0]
    assert gradients(lambda: np.sum(np.clip(v, 1, 3)))[0].tolist() == [1.0] * 3, "the ends too"
    assert gradients(lambda: np.max(v * 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.max(np.minimum(v, 2)))[0].tolist() == [0.0, 0.5, 0.0]
    assert gradients(lambda: np.sum(gr.autodiff.relu(v - 2)))[0].tolist() == [0.0, 0.0, 1.0]
    assert gradients(lambda: np.std(v * 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.prod(v - 1))[0].tolist() == [2.0, 0.0, 0.0]
    assert gradients(lambda: np.prod((v - 1) * (v - 2)))[0].tolist() == [0.0, 0.0, 0.0]


def test_fmax_and_fmin_give_the_gradient_to_the_number_beside_a_nan(mesh, v):
    holes = gr.Variable([np.nan, 2.5, np.nan], dtype="float32", device=mesh)
    for do in (np.fmax, np.fmin):
        for swapped in (False, True):
            loss = lambda do=do, x=(v, holes)[swapped], y=(holes, v)[swapped]: np.sum(do(x, y))  # noqa: E731
            of_v, of_holes = gradients(loss, [v, holes])
            second = float(do is np.fmin)  # of 2 and 2.5
            assert of_v.tolist() == [1.0, second, 1.0]
            assert of_holes.tolist() == [0.0, 1 - second, 0.0]
    found = gradients(lambda: np.sum(np.fmax(np.float32([np.nan, 5, np.nan]), v)))
    assert found[0].tolist() == [1.0, 0.0, 1.0]
    assert gradients(lambda: np.sum(np.fmin(v, np.nan)))[0].tolist() == [1.0] * 3


def test_clip_with_reversed_bounds_uses_the_upper_bound(v, mesh):
    low = gr.Variable([1.5] * 3, dtype="float32", device=mesh)
    high = gr.Variable([2.5, 1.0, 1.0], dtype="float32", device=mesh)
    assert np.clip(v, low, high).tolist() == [1.5, 1.0, 1.0]
    for loss, wanted in [
        (lambda: np.clip(v, low, high), [[0, 0, 0], [1, 0, 0], [0, 1, 1]]),
        (lambda: np.clip(v, low, 1.0), [[0, 0, 0], [0, 0, 0], None]),
        (lambda: np.clip(v, 3.0, high), [[0, 0, 0], None, [1, 1, 1]]),
        (lambda: np.clip(v, [0, 2.5, 0], high), [[1, 0, 0], None, [0, 1, 1]]),
        (lambda: np.clip(v, low, [2, 1, 9]), [[0, 0, 1], [1, 0, 0], None]),
    ]:
        found = gradients(loss, [v, low, high])
        assert [each if each is None else each.tolist() for each in found] == wanted


def test_edge_cases_give_no_nan(mesh, v):
    infinite = [np.inf] * 3
    assert gradients(lambda: np.maximum(v, 2.5), grad_loss=infinite)[0].tolist() == [0, 0, np.inf]
    assert gradients(lambda: np.sum((v - 1) ** 0))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum((v - 1) ** np.float32([0, 0, 2])))[0].tolist() == [0, 0, 4]
    exponents = gradients(lambda: np.sum(np.float32([0, 1, 0]) ** v))
    assert exponents[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum(0**v))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum((-2.0) ** v))[0].tolist() == [0.0] * 3
    assert gradients(lambda: np.sum(np.float32([-2, 1, -1]) ** v))[0].tolist() == [0.0] * 3
    many = gr.Variable(np.zeros(70_000), dtype="float16", device=mesh)
    (found,) = gradients(lambda: np.mean(many))
    assert (found == np.float16(1 / 70_000)).all()
    logits = gr.Variable([-np.inf, 0.0], dtype="float32", device=mesh)
    loss = lambda: gr.autodiff.softmax_cross_entropy(logits, np.array(1))  # noqa: E731
    assert (float(loss()), gradients(loss)[0].tolist()) == (0.0, [0.0, 0.0])


def test_our_functions_do_not_overflow(mesh):
    x = gr.Variable([1000.0, -1000.0, 0.0], dtype="float32", device=mesh)
    assert gradients(lambda: gr.autodiff.logsumexp(x))[0].tolist() == [1.0, 0.0, 0.0]
    assert gr.autodiff.sigmoid(x).tolist() == [1.0, 0.0, 0.5]
    assert gradients(lambda: np.sum(gr.autodiff.sigmoid(x)))[0].tolist() == [0.0, 0.0, 0.25]
    (found,) = gradients(lambda: gr.autodiff.softmax_cross_entropy(x, np.array(1)))
    assert found.tolist() == [1.0, -1.0, 0.0]
    assert gr.autodiff.logsumexp(np.float32([-np.inf, -np.inf])) == -np.inf
    assert gr.autodiff.logsumexp(np.zeros((2, 3), "f"), axis=(0, -1)).dtype == np.float32
    for labels in (np.zeros(2, int), np.zeros(2)):
        with pytest.raises(ValueError, match="labels"):
            gr.autodiff.softmax_cross_entropy(x, labels)


def test_labels_may_be_a_list_and_must_be_valid_classes(w):
    loss = lambda labels: gr.autodiff.softmax_cross_entropy(w, labels)  # noqa: E731
    for labels in ([0, 1, 0], [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]):
        wanted = gradients(lambda labels=labels: loss(np.array(labels)))[0]
        assert gradients(lambda labels=labels: loss(labels))[0].tolist() == wanted.tolist()
    for labels in ([0, 1, 2], np.array([0, 1, -1])):
        for do in (loss, lambda labels: gradients(lambda: loss(labels))):
            with pytest.raises(
                InvalidArgumentError, match=r"labels are from .* allowed are 0 to 1"
            ):
                do(labels)


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
    return gradients(lambda: loss(variable))[0]


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
