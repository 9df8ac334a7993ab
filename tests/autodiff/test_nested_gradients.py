"""Gradients inside losses, losses in micro-batches, and what a fault leaves behind."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.arrays.trace_context import current_reader

DESCENT = gr.GradientDescentOptimizer(1.0)
ADD_N, TREE, ACCUMULATE_N = 0, 1, 2


def gradients(loss, *args, **options):
    return [gradient for gradient, _ in DESCENT.compute_gradients(loss, *args, **options)]


# -- one call inside another ----------------------------------------------------------------------


def test_a_gradient_of_a_gradient(v):
    def penalty():
        ((slope, _),) = DESCENT.compute_gradients(lambda: np.sum(v**3))
        return np.sum(np.square(slope))  # 9 v**4

    assert gradients(penalty)[0].tolist() == [36.0, 288.0, 972.0]

    def twice():
        (slope,) = gradients(penalty)
        return np.sum(slope)  # 36 v**3

    assert gradients(twice)[0].tolist() == [108.0, 432.0, 972.0]


@pytest.mark.parametrize("operand", [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [2.0, 3.0, 5.0]])
def test_a_second_gradient_of_a_product_with_zeros(mesh, operand):
    x = gr.Variable(operand, device=mesh)
    weights = np.float32([1, 10, 100])
    slope = lambda: np.sum(gradients(lambda: np.prod(x), [x])[0] * weights)  # noqa: E731
    a, b, c = operand
    hessian = np.float32([[0, c, b], [c, 0, a], [b, a, 0]])
    assert gradients(slope, [x])[0].tolist() == (hessian @ weights).tolist()
    rows = lambda: np.prod(np.stack([x, x + 1, x * 2]), axis=(0,))  # noqa: E731
    wide = x.numpy()  # 2 x**3 + 2 x**2
    assert gradients(rows, [x])[0].tolist() == (6 * wide**2 + 4 * wide).tolist()


@pytest.mark.parametrize("method", [ADD_N, TREE, ACCUMULATE_N])
def test_a_gradient_of_a_sum_of_terms(v, w, method):
    def inner():
        rows = np.sum(np.square(gr.embedding_lookup(w, [0, 0, 2])))
        return np.sum(v) + np.sum(v * 1) + np.sum(v * v) + np.sum(v**3) + rows + np.sum(w[2:] * 2)

    def outer():
        slopes = gradients(inner, [v, w], aggregation_method=method)
        return np.sum(np.square(slopes[0])) + np.sum(slopes[1] * slopes[1])

    first, second = gradients(outer, [v, w], aggregation_method=method)
    x = v.numpy()
    assert first.tolist() == (2 * (2 * x + 2 + 3 * x**2) * (2 + 6 * x)).tolist()
    assert second.indices.tolist() == [0, 0, 2], "only looked up, as far as its slope depends on it"
    assert second.to_dense().tolist() == [[32.0, 64.0], [0.0, 0.0], [48.0, 56.0]]


def test_an_inner_call_may_use_values_of_the_outer_one(v):
    def loss():
        doubled = v * 2
        (slope,) = gradients(lambda: np.sum(doubled * v * v + doubled), [v])  # 2 doubled v
        return np.sum(slope)

    assert gradients(loss)[0].tolist() == [8.0, 16.0, 24.0]


def test_an_inner_loss_that_is_of_the_outer_one_alone_is_a_constant(v):
    def loss():
        doubled = np.sum(v * 2)
        assert gradients(lambda: doubled, [v]) == [None]
        return doubled

    assert gradients(loss)[0].tolist() == [2.0] * 3


def test_the_gradient_of_an_inner_loss_may_be_a_value_of_the_outer_one(v):
    def loss():
        (slope,) = gradients(lambda: v**3, [v], grad_loss=v)  # 3 v**3
        return np.sum(slope)

    assert gradients(loss)[0].tolist() == [9.0, 36.0, 81.0]


def test_arrays_of_an_inner_loss_lie_where_the_outer_one_does(v, monkeypatch):
    def refused():
        raise AssertionError("another mesh")

    monkeypatch.setattr("gradreduce.arrays.replica_context.default_mesh", refused)

    def loss():
        total = np.sum(v)
        (slope,) = gradients(lambda: np.sum(gr.add_n([np.ones(3), np.ones(3)]) * v), [v])
        return total * slope[0]

    assert gradients(loss)[0].tolist() == [2.0] * 3


def test_an_inner_call_is_a_constant_to_other_variables(v, w):
    def loss():
        (slope,) = gradients(lambda: np.sum(v * v), [v])
        return np.sum(w * slope[0])  # 2 v[0] w

    first, second = gradients(loss)
    assert first.tolist() == [42.0, 0.0, 0.0]
    assert second.tolist() == [[2.0, 2.0]] * 3


def test_a_value_of_an_earlier_loss_is_a_constant(v):
    kept = []

    def loss():
        kept.append(v * 2)
        return np.sum(kept[-1])

    gradients(loss)
    assert (kept[0] + 1).tolist() == [3.0, 5.0, 7.0], "plain arithmetic"
    assert gradients(lambda: np.sum(kept[0] * v))[0].tolist() == [2.0, 4.0, 6.0]
    assert gradients(lambda: np.sum(kept[0]), [v]) == [None]


# -- writing inside a loss ------------------------------------------------------------------------


def test_what_a_loss_has_read_is_not_written_inside_it(v, w):
    """The tape holds the memory of the Variable: the gradient would be of another value."""
    before = v.numpy()
    for write in (
        lambda: v.assign([7.0, 8.0, 9.0]),
        lambda: v.assign_add([7.0, 8.0, 9.0]),
        lambda: DESCENT.apply_gradients([(np.ones((3, 2), "float32"), w), (before, v)]),
        lambda: DESCENT.minimize(lambda: np.sum(v)),
        lambda: gradients(lambda: v.assign([7.0, 8.0, 9.0]) * w[0, 0], [w]),
    ):

        def loss(write=write):
            total = np.sum(v * v)
            with pytest.raises(RuntimeError, match=r"'v'.*inside a loss that has read it"):
                write()
            return total

        for variables in (None, [w, v]):
            assert gradients(loss, variables)[-1].tolist() == [2.0, 4.0, 6.0]
        assert (v.numpy() == before).all()
    assert w.numpy()[0, 0] == 1


def test_what_a_loss_only_looks_at_may_be_written(v, w):
    def loss():
        w.assign_add(w.numpy())
        v.assign(gr.autodiff.stop_gradient(w[:, 0] * 1))
        return np.sum(v * w[:, 1])

    first, second = gradients(loss, [v, w])
    assert first.tolist() == [4.0, 8.0, 12.0]
    assert second.tolist() == [[0.0, 2.0], [0.0, 6.0], [0.0, 10.0]]
    assert gradients(lambda: np.sum(v.assign([1.0, 1.0, 1.0]) * 2))[0].tolist() == [2.0] * 3


# -- micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ADD_N, TREE, ACCUMULATE_N])
def test_a_loss_may_yield_terms(v, w, method):
    def loss():
        shared = v * 2
        for place in range(5):
            yield np.sum(shared * place) + np.sum(gr.embedding_lookup(w, [place % 3]))

    first, second = gradients(loss, aggregation_method=method)
    assert first.tolist() == [20.0] * 3
    assert second.indices.tolist() == [0, 1, 2, 0, 1]
    assert gradients(loss, [v], aggregation_method=method, grad_loss=2.0)[0].tolist() == [40.0] * 3
    assert gradients(lambda: iter([np.sum(v), np.float32(1), np.sum(v)]))[0].tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="No variables"):
        DESCENT.compute_gradients(lambda: iter([]))


def test_each_term_ends_before_the_next_is_made(v):
    alive = []

    def loss():
        for _ in range(4):
            assert not [each for each in alive if each() is not None]
            hidden = np.tanh(v * 2)
            alive.append(weakref.ref(hidden.value))
            term = np.sum(hidden)
            del hidden
            yield term
            del term

    gc.disable()
    try:
        assert np.allclose(gradients(loss)[0], 8 * (1 - np.tanh(v.numpy() * 2) ** 2))
    finally:
        gc.enable()
    assert len(alive) == 4


# -- faults ---------------------------------------------------------------------------------------


class Planted(RuntimeError):
    """The failure that a test plants."""


def test_an_exception_in_a_loss_leaves_nothing_behind(v):
    alive = []

    def loss():
        hidden = v * 2
        plain = hidden.value
        alive.append(weakref.ref(plain.value if hasattr(plain, "value") else plain))
        raise Planted

    def inner():
        gradients(loss)
        return np.sum(v)

    def late():
        yield np.sum(v * 2)
        raise Planted

    gc.disable()
    try:
        for faulty in (loss, inner, late):
            try:
                gradients(faulty)
            except Planted:
                pass
            else:
                raise AssertionError("nothing was raised")
            assert current_reader() is None
            assert isinstance(v * 2, np.ndarray)
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()
    assert gradients(lambda: np.sum(v * v))[0].tolist() == [2.0, 4.0, 6.0]


def test_a_caught_exception_of_an_inner_call_changes_nothing(v):
    def loss():
        total = np.sum(v * v)
        with pytest.raises(Planted):
            gradients(faulty)
        return total + np.sum(v)

    def faulty():
        np.sum(v * 100)
        raise Planted

    assert gradients(loss)[0].tolist() == [3.0, 5.0, 7.0]
