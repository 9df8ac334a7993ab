"""Invalid operands: arrays with other arithmetic, and results that lose a gradient."""

from fractions import Fraction

import numpy as np
import pytest
from support.gradients import gradients

import gradreduce as gr

MASKED = np.ma.masked_array(np.float32([1, 2, 3]), mask=[0, 1, 0])


def test_results_that_lose_a_gradient_are_refused(v, w):
    for loss, match in [
        (lambda: (v * 1) * Fraction(1, 2), r"as the dtype of its result.*PyTorch"),
        (lambda: (v * 1) * np.array([1, 2, 3], object), r"as the dtype of its result.*PyTorch"),
        (lambda: (v * 1).astype(object), r"as the dtype of its result.*PyTorch"),
        (lambda: np.where([True, False, True], v * 1, Fraction(1, 2)), "dtype of its result.*PyT"),
        (lambda: (v * 1).astype("m8[s]"), r"as the dtype of its result.*PyTorch"),
        (lambda: (w * 1).flatten("F"), r"order=.*PyTorch"),
        (lambda: (w * 1).ravel("K"), r"order=.*PyTorch"),
        (lambda: (w * 1).reshape(-1, order="A"), r"order=.*PyTorch"),
        (lambda: gr.add_n([v * 1, v * 2], output_type="buffer"), "output_type='buffer'"),
    ]:
        with pytest.raises(NotImplementedError, match=match):
            gradients(lambda loss=loss: np.sum(loss()))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
def test_masked_arrays_and_matrices_are_refused_as_operands(v):
    for loss in (
        lambda x: np.einsum("ij,j->i", np.eye(3, dtype="f"), x) - MASKED,
        lambda x: MASKED @ x,
        lambda x: np.maximum(MASKED, x),
        lambda x: np.where(x > MASKED, x, 0.0),
        lambda x: np.where(MASKED > 1, x, 0.0),
        lambda x: np.stack([x, MASKED]),
        lambda x: x * [MASKED[0], MASKED[1], 2.0],
        lambda x: np.clip(x, a_min=MASKED, a_max=3),
        lambda x: np.dot(MASKED, x),
        lambda x: x[MASKED > 1],
        lambda x: gr.autodiff.softmax_cross_entropy(x, MASKED),
        lambda x: np.matrix([[1.0, 2.0, 3.0]]) * x,
        lambda x: x + np.matrix([[1.0, 2.0, 3.0]]),
    ):
        with pytest.raises(TypeError, match=r"np\.(MaskedArray|MaskedConstant|matrix) is not"):
            gradients(lambda loss=loss: np.sum(loss(v * 1)))
    for loss in (lambda x: MASKED * x, lambda x: MASKED - x, lambda x: np.ma.sum(x)):
        with pytest.raises(TypeError, match="plain array"):
            gradients(lambda loss=loss: np.sum(loss(v * 1)))
    with pytest.raises(TypeError, match="Masked"):
        gradients(lambda: v * 1, grad_loss=MASKED)


def test_a_list_of_traced_values_is_an_operand_of_what_joins_alone(v):
    assert gradients(lambda: np.sum(np.stack([v[0], v[1]]) * v[2]))[0].tolist() == [3.0, 3.0, 3.0]
    for loss in (
        lambda: v * [v[0], v[1], 1.0],
        lambda: np.where([True, False], v[:2], (v[0], v[1])),
    ):
        with pytest.raises(NotImplementedError, match=r"np\.stack joins it"):
            gradients(loss)
    with pytest.raises(NotImplementedError, match="traced argument 2"):
        gradients(lambda: np.sum(v * 1, None, v[0]))


def test_numbers_of_numpy_and_lists_are_arguments(v):
    for loss, wanted in [
        (lambda x: np.power(x, [1, 2, 3]), [1, 4, 27]),
        (lambda x: np.power((1, 1, 2), x)[:2], [0, 0, 0]),
        (lambda x: np.tile(x, np.array([2, 2])), [4, 4, 4]),
        (lambda x: np.split(x, np.int64(3))[1], [0, 1, 0]),
        (lambda x: x[range(2)], [1, 1, 0]),
        (lambda x: x.reshape(1, 3, order="C").flatten("C"), [1, 1, 1]),
        (lambda x: x.astype("float64", copy=False) * x.item(1), [2, 2, 2]),
        (lambda x: np.linalg.norm(x[None, :1], 2, axis=np.int64(1)), [1, 0, 0]),
        (lambda x: np.linalg.norm(x[None, 2:], 2, axis=(1,)), [0, 0, 1]),
    ]:
        assert gradients(lambda loss=loss: np.sum(loss(v * 1)))[0].tolist() == wanted


def test_a_single_row_is_looked_up_by_an_integer(v, w):
    assert gr.embedding_lookup(w, 1).tolist() == [3.0, 4.0]
    (rows,) = gradients(lambda: gr.embedding_lookup(w, 1))
    assert (rows.indices.tolist(), rows.values.tolist()) == ([1], [[1.0, 1.0]])
    assert gradients(lambda: gr.embedding_lookup(v * 1, (2, 0)))[0].tolist() == [1.0, 0.0, 1.0]
