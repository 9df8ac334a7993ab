"""IndexedSlices as terms: concatenated if all terms are sparse, otherwise a dense sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact_data import DTYPES, exact_data, random_data, same
from support.exhaustive import examples
from support.meshes import refused

import gradreduce as gr

METHODS = [0, 1, 2, None]
ROWS, WIDTH = 7, 5


def slices_of(indices, *, dtype="float32", dense_shape=(ROWS, WIDTH), seed=0, make=exact_data):
    return gr.IndexedSlices(make((len(indices), WIDTH), dtype, seed=seed), indices, dense_shape)


def dense_of(dtype="float32", seed=9, make=exact_data):
    return make((ROWS, WIDTH), dtype, seed=seed)


def small(indices, values, dense_shape):
    return gr.IndexedSlices(np.array(values, "float32"), indices, dense_shape)


def forms(terms):
    """The terms as a list and as an iterator."""
    return terms, iter(terms)


# -- lists of sparse terms -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_terms_that_are_all_sparse_are_joined(method):
    """Keeps duplicates and the first dense_shape; returns a single term; ignores None."""
    for shapes in [((4, 2), (9, 2)), (None, (9, 2)), ((-1, 2), (9, 2)), ((9, 2), None)]:
        one = small([1, 1], [[1, 2], [3, 4]], shapes[0])
        other = small([1, 3], [[3, 4], [5, 6]], shapes[1])
        for terms in forms([one, other]) + forms([one, None, other]):
            made = gr.aggregate(terms, method)
            assert made.indices.tolist() == [1, 1, 1, 3]
            assert same(made.values, np.array([[1, 2], [3, 4], [3, 4], [5, 6]], "float32"))
            assert made.dense_shape == shapes[0]
        for terms in forms([one]) + forms([None, one, None]):
            assert gr.aggregate(terms, method) is one


def test_what_does_not_take_sparse_terms_says_so(mesh):
    ones = np.ones((3, 2), "float32")
    for dense_shape in (None, (-1, 2)):
        unknown = small([1], [[5, 6]], dense_shape)
        with refused(mesh, ValueError, "dense_shape of .* is unknown"):
            gr.add_n([unknown])
        for terms in ([unknown, ones], [unknown, unknown]):
            with refused(mesh, TypeError, "dense_shape of .* is unknown"):
                gr.add_n(terms)
    sparse = small([1], [[5, 6]], (3, 2))
    for terms in ([sparse], [sparse, sparse], [ones, sparse], (sparse, ones)):
        with refused(mesh, ValueError, "accumulate_n does not accept IndexedSlices"):
            gr.accumulate_n(terms)
    for terms in ([sparse], [sparse, ones]):
        with refused(mesh, ValueError, "Invalid aggregation_method"):
            gr.aggregate(terms, 3)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sparse_term_counts_as_its_whole_array(dtype, method):
    """The bits are those of the method's order, for lists and iterators."""
    terms = [
        slices_of([2, 2, 6], dtype=dtype, seed=1, make=random_data),
        slices_of([0, 2], dtype=dtype, seed=2, make=random_data),
        dense_of(dtype, make=random_data),
        slices_of([], dtype=dtype),
        dense_of(dtype, 8, make=random_data),
    ]
    for order in ([0, 1, 2, 3, 4], [2, 0, 1, 4, 3], [4, 2, 3, 1, 0]):
        given_terms = [terms[place] for place in order]
        whole = [term if isinstance(term, np.ndarray) else term.to_dense() for term in given_terms]
        expected = gr.aggregate(whole, min(method, 1))  # ACCUMULATE_N adds these in pairs too
        for form in forms(given_terms):
            assert same(gr.aggregate(form, method), expected)
        if method == 0:
            assert same(gr.add_n(given_terms), expected)


def test_accumulate_n_adds_in_pairs_what_holds_a_sparse_term():
    """TREE gives 2**24 + 2; from left to right each 1 is rounded away."""
    ones = np.ones((2, 1), "float32")
    sparse = small([0, 1], [[1], [1]], (2, 1))
    large = np.full((2, 1), 2**24, "float32")
    for place in range(4):
        terms = [large, ones, ones, ones]
        assert (gr.aggregate(terms, 2) == 2**24).all()
        terms[place] = small([0, 1], large, (2, 1)) if place == 0 else sparse
        assert (gr.aggregate(terms, 1) == 2**24 + 2).all()
        assert (gr.aggregate(terms, 2) == 2**24 + 2).all()
        # From an iterator, three dense terms before the first sparse one are already one sum.
        assert (gr.aggregate(iter(terms), 2) == (2**24 + 2 if place < 3 else 2**24)).all()
        assert (gr.aggregate(terms, 0) == 2**24).all()


@settings(max_examples=examples(40), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    lists=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=6), min_size=1, max_size=5),
    random=st.randoms(),
)
def test_joined_and_coalesced_terms_equal_the_sum(dtype, lists, random):
    terms = [slices_of(indices, dtype=dtype, seed=k) for k, indices in enumerate(lists)]
    joined, total = gr.aggregate(terms), gr.add_n(terms)
    assert same(joined.to_dense(), total)
    assert same(joined.coalesce().to_dense(), total)
    random.shuffle(terms)
    assert same(gr.aggregate(terms).to_dense(), total)


# -- places, kinds, memory ------------------------------------------------------------------------


def placed(device, term):
    if isinstance(term, np.ndarray):
        return device.put(term)
    return gr.IndexedSlices(device.put(term.values), term.indices, term.dense_shape)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("places", [(1, 1, 1), (1, 0, 1), (2, 0, 1), (0, 2, 2)], ids=str)
def test_terms_on_several_devices_are_added_on_the_first(mesh, places, mapped):
    terms = [slices_of(indices, seed=k) for k, indices in enumerate([[3, 1], [1], [6, 6, 3]])]
    spread = [placed(mesh.devices[place], term) for place, term in zip(places, terms, strict=True)]
    for term in spread:
        term.values.block.peer_mapped = mapped
    with mesh.journal() as journal:
        made = gr.aggregate(spread)
    physical = [mesh.devices[place].physical for place in places]
    far = [place for place in places if mesh.devices[place].physical != physical[0]]
    several = len(far) - len(set(far))  # terms of one device are packed there and copied once
    assert (journal.launches, journal.copies) == (
        (1, 0) if mapped else (1 + several, len(set(far)))
    )
    assert (made.device, made.kind) == (mesh.devices[places[0]], "buffer")
    assert same(made.values.numpy(), gr.aggregate(terms).values)
    mixed = [*spread[:2], placed(mesh.devices[places[2]], dense_of())]
    total = gr.aggregate(mixed)
    assert total.device is mesh.devices[places[0]]
    assert same(total.numpy(), gr.aggregate([*terms[:2], dense_of()]))


def test_the_device_work_of_each_call(mesh):
    device = mesh.devices[0]
    sparse = [placed(device, slices_of([1, 2, 1], seed=seed)) for seed in range(4)]
    dense = placed(device, dense_of())
    for terms, names in (
        (sparse, ["pack"]),
        ([*sparse, dense], ["fill"] * 4 + ["upload", "segment_sum", "add_n"]),
    ):
        with mesh.journal() as journal:
            gr.aggregate(terms)
        assert [record.name or record.kind for record in journal.records] == names


def test_the_array_type_is_that_of_the_first_term(mesh):
    sparse, dense = slices_of([1]), dense_of()
    on_device = placed(mesh.devices[0], slices_of([2]))
    for form in (list, iter):
        assert gr.aggregate(form([sparse, on_device])).kind == "native"
        assert gr.aggregate(form([on_device, sparse])).kind == "buffer"
        assert gr.aggregate(form([on_device, sparse]), output_type="numpy").kind == "native"
        assert isinstance(gr.aggregate(form([sparse, on_device, dense])), np.ndarray)
        assert isinstance(gr.aggregate(form([on_device, dense])), gr.Buffer)
        assert isinstance(gr.aggregate(form([dense, sparse]), output_type="buffer"), gr.Buffer)
    assert isinstance(gr.add_n([on_device]), gr.Buffer)
    assert isinstance(gr.add_n([on_device], output_type="numpy"), np.ndarray)


# -- what does not fit ----------------------------------------------------------------------------


def test_terms_that_do_not_fit_are_refused(mesh):
    def other(dtype="float32", dense_shape=(ROWS, WIDTH), indices=(1,), width=WIDTH):
        return gr.IndexedSlices(np.ones((len(indices), width), dtype), list(indices), dense_shape)

    wide = other("float64")
    for odd, error, text in (
        (wide, TypeError, "that don't all match: .* input 1 is float64"),
        (other(dense_shape=(9, WIDTH), indices=(0, 8)), ValueError,
         r"indices\[2\] = 8 is not below dense_shape\[0\] = 7"),
        (other(dense_shape=None, width=4), ValueError,
         r"rows of the same shape\. Input 0: \[5\] != input 1: \[4\]"),
    ):  # fmt: skip
        for form in (list, iter):
            for terms in ([slices_of([1]), odd], [None, slices_of([1]), odd, slices_of([2])]):
                with refused(mesh, error, text):
                    gr.aggregate(form(terms))
    dense = dense_of()
    for odd, error, text in (
        (wide, TypeError, "that don't all match: .* input 1 is float64"),
        (other(dense_shape=(9, WIDTH)), ValueError, r"Input 0: \[7, 5\] != input 1: \[9, 5\]"),
        (other(dense_shape=None), TypeError, "dense_shape of .* is unknown"),
        (other(dense_shape=(-1, WIDTH)), TypeError, "is unknown"),
        (object(), TypeError, "object is not an array"),
    ):
        for call in (gr.add_n, gr.aggregate, lambda terms: gr.aggregate(iter(terms))):
            with refused(mesh, error, text):
                call([dense, odd])
        for call in (gr.add_n, gr.aggregate):
            with refused(mesh, error, text):
                call([slices_of([1]), odd, dense])
    assert same(dense, dense_of())
