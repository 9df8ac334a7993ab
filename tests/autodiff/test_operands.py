"""What an operand may be: no array of other arithmetic, and no result that loses a gradient."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import gradreduce as gr

DESCENT = gr.GradientDescentOptimizer(1.0)
MASKED = np.ma.masked_array(np.float32([1, 2, 3]), mask=[0, 1, 0])


def gradients(loss, *args, **options):
    return [gradient for gradient, _ in DESCENT.compute_gradients(loss, *args, **options)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: x * Fraction(1, 2),
        lambda x: x * np.array([1, 2, 3], object),
        lambda x: x.astype(object),
        lambda x: np.where([True, False, True], x, Fraction(1, 2)),
        lambda x: x.astype("m8[s]"),
    ],
)
def test_a_result_of_objects_is_no_constant(v, loss):
    with pytest.raises(NotImplementedError, match=r"as the dtype of its result.*PyTorch"):
        gradients(lambda: np.sum(loss(v * 1)))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
@pytest.mark.parametrize(
    "loss",
    [
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
    ],
)
def test_a_masked_array_and_a_matrix_are_no_operands(v, loss):
    with pytest.raises(TypeError, match=r"would lose its mask|np\.matrix is multiplied"):
        gradients(lambda: np.sum(loss(v * 1)))


def test_a_masked_seed_is_refused(v):
    with pytest.raises(TypeError, match="mask"):
        gradients(lambda: v * 1, grad_loss=MASKED)


def test_numpys_masked_functions_raise(v):
    for loss in (lambda x: MASKED * x, lambda x: MASKED - x, lambda x: np.ma.sum(x)):
        with pytest.raises(TypeError, match="plain array"):
            gradients(lambda loss=loss: np.sum(loss(v * 1)))


def test_a_list_of_traced_values_is_an_operand_of_what_joins_alone(v):
    assert gradients(lambda: np.sum(np.stack([v[0], v[1]]) * v[2]))[0].tolist() == [3.0, 3.0, 3.0]
    for loss in (
        lambda: v * [v[0], v[1], 1.0],
        lambda: np.where([True, False], v[:2], (v[0], v[1])),
    ):
        with pytest.raises(NotImplementedError, match=r"np\.stack joins it"):
            gradients(loss)
    with pytest.raises(NotImplementedError, match="traced argument 5"):
        gradients(lambda: np.sum(v * 1, None, None, None, False, v[0]))
