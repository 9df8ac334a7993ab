"""Weighted sums of terms on one device and on several."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import same
from support.exhaustive import examples

import gradreduce as gr
from gradreduce.device import as_dtype

METHODS = list(gr.AggregationMethod)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_the_sum_is_that_of_the_products(data):
    """Of lists and generators, of arrays and rows, on one device or two."""
    dtype = as_dtype(data.draw(st.sampled_from(["float16", "bfloat16", "float32", "int16"])))
    whole = st.sampled_from([0, 1, 2, 3, 8])
    weights = data.draw(st.lists(whole, min_size=1, max_size=6).filter(any), "weights")
    method = data.draw(st.sampled_from(METHODS))
    rng, total, terms = np.random.default_rng(0), np.zeros((4, 2)), []
    with gr.open_mesh(2, backend="sim", strict=True) as mesh:
        for weight in weights:
            form = data.draw(st.sampled_from(["dense", "rows", "none"]))
            device = mesh[data.draw(st.integers(0, 1))]
            values = rng.integers(-4, 5, (4, 2)).astype(dtype)
            if form == "rows":
                values[1:3] = 0
            if form != "none":
                total += weight * values.astype("float64")
            if not weight and dtype.kind != "i":
                values[:] = np.nan
            if form == "rows":
                rows = device.upload(values[[3, 0]])
                terms.append(gr.IndexedSlices(rows, [3, 0], (4, 2)))
            else:
                terms.append(None if form == "none" else device.upload(values))
        given = terms if data.draw(st.booleans(), "list") else iter(terms)
        found = gr.aggregate(given, method, weights=weights, output_type="numpy")
    pairs = zip(terms, weights, strict=True)
    if not any(weight and term is not None for term, weight in pairs):
        assert found is None
    else:
        found = found.to_dense() if isinstance(found, gr.IndexedSlices) else found
        assert same(found, total.astype(dtype))


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


def test_a_loss_may_weigh_its_terms():
    def loss(x, y):
        return np.sum(gr.aggregate([x * x, y], weights=[3, 0.5]))

    with gr.open_mesh(1, backend="sim") as mesh:
        x = gr.Variable(np.float32([1, 2]), "x", device=mesh)
        y = gr.Variable(np.float32([5, 7]), "y", device=mesh)
        pairs = gr.GradientDescentOptimizer(0.1).compute_gradients(lambda: loss(x, y), [x, y])
        assert [np.asarray(grad).tolist() for grad, _ in pairs] == [[6, 12], [0.5, 0.5]]


@pytest.mark.parametrize("call", [gr.aggregate, gr.accumulate_n])
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
