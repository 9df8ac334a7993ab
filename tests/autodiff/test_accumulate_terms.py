"""The aggregation method gets all terms of a tensor: their order and memory."""

import gc
import math
import tracemalloc

import numpy as np
import pytest
from support.meshes import mesh_of

import gradreduce as gr
from gradreduce.autodiff.accumulate_terms import TermAccumulator
from gradreduce.sums.methods import AggregationMethod

DESCENT = gr.GradientDescentOptimizer(1.0)
METHODS = list(AggregationMethod)
ADD_N, TREE, ACCUMULATE_N = METHODS
NUM_USES = 16
SIZE = 1 << 18  # elements: a MiB


mesh = mesh_of([0, 0])


def gradient(loss, method):
    ((found, _),) = DESCENT.compute_gradients(loss, aggregation_method=method)
    return found


def left_to_right(terms):
    total = np.float32(0)
    for term in terms:
        total = np.float32(total + np.float32(term))
    return total


def in_pairs(terms):
    terms = [np.float32(term) for term in terms]
    while len(terms) > 1:
        terms = [sum(terms[place : place + 2], np.float32(0)) for place in range(0, len(terms), 2)]
    return terms[0]


def memory_of(call):
    """Returns the result, and the most bytes that the call allocates."""
    gc.collect()
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BIG = [9.0, 5.0, 7.0, 1e8, -1e8, 7.0, 7.0]  # of which every order has a sum of its own


def of_a_variable(x):
    return sum(np.sum(x * np.float32(term)) for term in BIG)


def of_a_value(x):
    return of_a_variable(x * np.float32(1))


def yielded(x):
    for term in BIG:
        yield np.sum(x * np.float32(term))


def by_fold(x):
    total = np.zeros(1, "float32")
    for term in BIG:
        total = np.tanh(x * np.float32(term)) + total * np.float32(1)
    return np.sum(total)


def first_at_the_end_of_a_chain(x):
    first = np.sum(np.tanh(np.sin(x * np.float32(BIG[0]))))
    rest = [np.sum(x * np.float32(term)) for term in BIG[1:]]
    for _ in range(20):
        first = np.tanh(first)
    return sum(rest) + first


@pytest.mark.parametrize(
    "loss", [of_a_variable, of_a_value, yielded, by_fold, first_at_the_end_of_a_chain]
)
@pytest.mark.parametrize("method", METHODS)
def test_terms_are_combined_in_the_order_of_the_uses(mesh, method, loss):
    x = gr.Variable([0.0], dtype="float32", device=mesh)
    wanted = in_pairs(BIG) if method is TREE else left_to_right(BIG)
    assert wanted not in (left_to_right(BIG[::-1]), in_pairs(BIG[::-1]))
    assert left_to_right(BIG) != in_pairs(BIG)
    assert gradient(lambda: loss(x), method)[0] == wanted


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("yields", [False, True])
def test_accumulate_n_adds_in_pairs_with_rows_among_the_terms(mesh, place, yields):
    x = gr.Variable(np.zeros((2, 1), "float32"), device=mesh)

    def terms():
        for turn, factor in enumerate([2.0**24, 1.0, 1.0, 1.0]):
            used = gr.embedding_lookup(x, [0, 1]) if turn == place else x
            yield np.sum(used * np.float32(factor))

    loss = terms if yields else lambda: sum(terms())
    # Three dense terms in front of the rows are one sum by then.
    assert (gradient(loss, ACCUMULATE_N) == (2**24 + 2 if place < 3 else 2**24)).all()
    assert (gradient(loss, TREE) == 2**24 + 2).all()


def test_stored_terms_are_sorted_by_use(mesh):
    """Terms of a recurrence arrive in reverse; methods that add at once add them so."""
    x = gr.Variable([1.0], dtype="float32", device=mesh)
    terms = [2.0**24, 1.0, 1.0, 1.0]

    def loss():
        state = np.float32(terms[:1])
        for following in (*terms[1:], 0.0):
            state = x * state
            state = state + np.float32(following - state[0].item())
        return np.sum(state)

    assert left_to_right(terms) != left_to_right(terms[::-1])
    assert gradient(loss, ADD_N)[0] == left_to_right(terms)
    assert gradient(loss, ACCUMULATE_N)[0] == left_to_right(terms[::-1])


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_agree_on_exact_data_and_keep_the_documented_number_of_arrays(mesh, method):
    """Largest number of arrays: ADD_N all and the sum; TREE log2 n + 1; ACCUMULATE_N three."""
    x = gr.Variable(np.zeros(SIZE, "float32"), device=mesh)

    def loss():
        return sum(np.sum(x * (place + 1.0)) for place in range(NUM_USES))

    gradient(lambda: np.sum(x * 2) + np.sum(x), method)  # allocates what is kept
    found, peak = memory_of(lambda: gradient(loss, method))
    assert (found == sum(range(NUM_USES + 1))).all()
    most = {ADD_N: NUM_USES + 1, TREE: math.log2(NUM_USES) + 1, ACCUMULATE_N: 3}[method]
    assert most - 1.1 < peak / found.nbytes < most + 0.1


def test_a_term_is_never_written(mesh):
    for method in METHODS:
        given = [np.full(3, place, "float16") for place in range(5)]
        for each in given:
            each.flags.writeable = False
        terms = TermAccumulator(method)
        for place, each in enumerate(given):
            terms.push(each, (place, 0), mesh.devices[1])
        total = terms.result()
        assert total.tolist() == [10.0] * 3
        assert total.flags.writeable


def test_operands_of_a_rule_are_freed_when_it_has_run(mesh):
    """Eight layers keep eight operands and make eight gradients, never both at the same time."""
    layers = [gr.Variable(np.ones(SIZE, "float32"), device=mesh) for _ in range(8)]

    def loss():
        hidden = np.ones(SIZE, "float32")
        for layer in layers:
            hidden = hidden * layer
        return np.sum(hidden)

    DESCENT.compute_gradients(loss)
    found, peak = memory_of(lambda: DESCENT.compute_gradients(loss))
    assert len(found) == 8
    assert peak / found[0][0].nbytes < 8 + 3.1
