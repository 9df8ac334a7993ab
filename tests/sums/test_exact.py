"""Sums with ``exact=True``: real numbers, rounded once, whatever the order and the devices."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exact_data import random_data, same
from support.exact_sums import (
    adversarial_terms,
    exact_reduction,
    exact_sums,
    exact_terms,
    may_warn,
)
from support.exhaustive import examples

import gradreduce as gr
from gradreduce.device import as_dtype

DTYPES = ["float16", "bfloat16", "float32", "complex64", "float64", "complex128"]
SHAPE = (4, 15)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_any_layout_of_the_terms_has_the_sum_of_the_definition(mesh, data):
    """Lists and generators, any method, order and devices; None and the weight 0 are skipped.

    Without ``exact=True``, sums of small whole numbers, of which some are rows.
    """
    exact = data.draw(st.booleans(), "exact")
    dtype = as_dtype(data.draw(st.sampled_from([*DTYPES, "int16"]), "dtype"))
    count, seed = data.draw(st.integers(1, 12), "terms"), data.draw(st.integers(0, 9999), "seed")
    terms = exact_terms(count, SHAPE, dtype, seed, rounded=not exact)
    weights = [1] * count
    if data.draw(st.booleans(), "weighted"):
        few = [0, 1, 2, 3] if dtype.kind == "i" else [0, 1, 0.5, 3]
        some = st.lists(st.sampled_from(few), min_size=count, max_size=count)
        weights = data.draw(some.filter(any), "weights")
    is_rows = [not exact and data.draw(st.booleans(), "rows") for _ in terms]
    for term, sparse in zip(terms, is_rows, strict=True):
        term[1:3] = 0 if sparse else term[1:3]
    wanted = exact_reduction([term.reshape(-1) for term in terms], weights, mean=False)
    is_lost = exact and may_warn(terms, weights)  # MAX + MAX is one, too
    for term, weight in zip(terms, weights, strict=True):
        term.fill(1 if dtype.kind == "i" else np.nan) if not weight else None

    def placed(number):
        device = mesh[data.draw(st.integers(0, 3), "device")]
        if not is_rows[number]:
            return device.upload(terms[number])
        return gr.IndexedSlices(device.upload(terms[number][[3, 0]]), [3, 0], SHAPE)

    for _ in range(2):
        order = data.draw(st.permutations([*range(count), None]), "order")
        given = [None if number is None else placed(number) for number in order]
        by = None if set(weights) == {1} else [1 if k is None else weights[k] for k in order]
        method = data.draw(st.sampled_from(list(gr.AggregationMethod)), "method")
        if data.draw(st.booleans(), "generator"):
            given = iter(given)
        with warnings.catch_warnings(record=True, action="always") as caught:
            found = gr.aggregate(given, method, weights=by, exact=exact, output_type="numpy")
        found = found.to_dense() if isinstance(found, gr.IndexedSlices) else found
        assert (is_lost and caught) or (not caught and same(found, wanted.reshape(SHAPE)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_n_adds_in_one_launch_on_the_first_device(mesh, dtype):
    terms = [random_data((300,), dtype, seed=seed) for seed in range(5)]
    if may_warn(terms):  # the last kind of terms, which overflow
        terms = [term[:50] for term in adversarial_terms(5, 60, dtype, 3)]
    placed = [mesh[index].upload(term) for index, term in zip((1, 0, 1, 2, 3), terms, strict=True)]
    with mesh.journal() as journal:
        total = gr.add_n(placed, exact=True)
    found = [(each.kind, each.name) for each in journal.records if each.kind in ("launch", "copy")]
    assert found == [("launch", "exact_sum")]
    assert total.device is mesh[1]
    assert same(total.numpy(), exact_sums(terms))
    assert all(same(buffer.numpy(), term) for buffer, term in zip(placed, terms, strict=True))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_sum_of_float64_that_eight_words_do_not_hold_warns(mesh, dtype):
    """At the end of the call, which it names. The next call has another flag."""
    fits, too_wide = ([np.full(3, 2.0 ** (100 * k), dtype) for k in range(-8, most)]
                      for most in (0, 1))  # fmt: skip
    placed = [mesh[1].upload(term) for term in too_wide]
    for terms in (too_wide, placed):
        for name in ("add_n", "aggregate"):
            with pytest.warns(gr.InexactSumWarning, match=f"sum of '{name}' did not") as caught:
                getattr(gr, name)(terms, exact=True)
            assert (len(caught), caught[0].filename) == (1, __file__)
            assert same(np.asarray(getattr(gr, name)(fits, exact=True)), fits[-1])
    # Terms on the way may cancel.
    total = gr.aggregate([*fits, *[-term for term in fits], np.full(3, 5, dtype)], exact=True)
    assert total.tolist() == [5] * 3


def test_integers_are_added_modulo_their_size_as_without_it(mesh):
    terms = [random_data((50,), "int16", seed=seed) for seed in range(4)]
    with mesh.journal() as journal:
        found = gr.add_n(terms, exact=True)
    assert [each.name for each in journal.records if each.kind == "launch"] == ["all_sum"]
    assert same(found, gr.add_n(terms))
    twice = gr.aggregate(iter(terms), exact=True, weights=[2, 0, 1, 1])
    assert same(twice, gr.aggregate(terms, weights=[2, 0, 1, 1]))
    assert same(gr.add_n([[3, 4], [1, 2]], exact=True), np.array([4, 6]))


def test_a_single_term_is_returned_itself():
    (term,) = terms = [np.float32([1, 2])]
    assert gr.add_n(terms, exact=True) is term
    assert gr.aggregate(iter([None, term]), exact=True) is term
    assert gr.aggregate([None], exact=True) is None
    assert gr.aggregate([], exact=True) is None


SLICES = gr.IndexedSlices(np.ones((1, 2), np.float32), [0], (3, 2))
ROWS = (
    "exact=True does not support IndexedSlices in this call: pass .to_dense() if no index is "
    "repeated, or use a SparseConditionalAccumulator with exact=True"
)
REFUSED = [
    ([np.ones((3, 2), np.float32), SLICES], ValueError, ROWS),
    ([np.float32([1]), np.float16([1])], TypeError,
     "inputs have dtypes that don't all match: input 0 is float32, input 1 is float16"),
    ([np.float32([1]), np.float32([1, 2])], ValueError,
     "inputs must have the same size and shape (nothing is broadcast). Input 0: [1] != input 1: "
     "[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("terms", "error", "text"), REFUSED)
def test_what_it_cannot_add_is_refused_before_a_launch(mesh, terms, error, text):
    weights = [0.5] * len(terms)
    calls = [
        lambda: gr.add_n(terms, exact=True),
        lambda: gr.aggregate(terms, exact=True),
        lambda: gr.aggregate(iter(terms), 2, exact=True),
        lambda: gr.aggregate(terms, weights=weights, exact=True),
        lambda: gr.aggregate(iter(terms), weights=weights, exact=True),
    ]
    with mesh.journal() as journal:
        for call in calls:
            with pytest.raises(error) as raised:
                call()
            assert str(raised.value) == text
    assert not [each for each in journal.records if each.kind == "launch"]


def test_rows_are_refused_only_where_they_would_be_rounded(mesh):
    half = gr.IndexedSlices(np.ones((1, 2), np.float16), [2], (3, 2))
    for terms, weights in (([SLICES] * 2, None), ([half], None), ([SLICES] * 2, [0.1, 3])):
        plain, found = (
            gr.aggregate(terms, weights=weights, exact=exact) for exact in (False, True)
        )
        assert found.indices.tolist() == plain.indices.tolist()
        assert same(found.values, plain.values)
    for call in (
        lambda: gr.add_n([SLICES], exact=True),
        lambda: gr.aggregate([half, half], weights=[0.1, 3], exact=True),
    ):
        with pytest.raises(ValueError, match="does not support IndexedSlices"):
            call()
