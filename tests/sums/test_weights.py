"""Weighted sums of terms on one device and on several."""

from functools import partial

import numpy as np
import pytest
from support.exact_data import same

import gradreduce as gr


def test_weights_of_1_make_the_same_call():
    terms = [np.float16([1, 2]), np.float16([3, 4])]
    assert gr.accumulate_n(terms[:1], weights=[1]) is terms[0]
    assert same(gr.aggregate(terms, weights=[1, 1.0]), gr.aggregate(terms))


def test_one_launch_multiplies_and_adds():
    with gr.open_mesh(1, backend="sim") as mesh:
        terms = [mesh[0].upload(np.ones(3, "float32")) for _ in range(3)]
        with mesh.journal() as journal:
            gr.accumulate_n(terms, weights=[2, 1, 3])
        assert [each.name for each in journal.records] == ["scale", "add_scaled", "add_scaled"]


@pytest.mark.parametrize(
    ("options", "grads"),
    [({"weights": [3, 0.5]}, [[6, 12], [0.5, 0.5]]), ({"exact": True}, [[2, 4], [1, 1]])],
)
def test_a_loss_may_add_its_terms(options, grads):
    def loss(x, y):
        return np.sum(gr.aggregate([x * x, y], **options))

    with gr.open_mesh(1, backend="sim") as mesh:
        x = gr.Variable(np.float32([1, 2]), "x", device=mesh)
        y = gr.Variable(np.float32([5, 7]), "y", device=mesh)
        pairs = gr.GradientDescentOptimizer(0.1).compute_gradients(lambda: loss(x, y), [x, y])
        assert [np.asarray(grad).tolist() for grad, _ in pairs] == grads


@pytest.mark.parametrize(
    "call",
    [gr.aggregate, gr.accumulate_n, partial(gr.aggregate, exact=True)],
    ids=["aggregate", "accumulate_n", "exact"],
)
@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ([1], ValueError, "weights has 1 entries; expected 2, one per term"),
        (3, TypeError, "weights=3 must be a list with one number per term"),
        ([0, 0], ValueError, "the sum of all weights is 0: at least one term must have a weight"),
        ([1, -1], ValueError, "weights[1]=-1 must be a finite number of at least 0"),
        ([0.5, 1], ValueError, "weight 0.5 of int32 must be a whole number below 2**63"),
    ],
)
def test_wrong_weights(call, weights, kind, message):
    with pytest.raises(kind) as caught:
        call([np.int32([1]), np.int32([1])], weights=weights)
    assert str(caught.value) == message
