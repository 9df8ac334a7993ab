"""What a loss may do, losses in micro-batches and in threads, and the state after an error."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from support.gradients import DESCENT, gradients

import gradreduce as gr
from gradreduce.arrays.trace_context import current_reader

ADD_N, TREE, ACCUMULATE_N = 0, 1, 2


def test_a_gradient_inside_a_loss_is_refused(v, w):
    """Also if it does not depend on the outer loss: it would silently be a constant."""

    def loss():
        total = np.sum(v * v)
        for inner in (
            lambda: gradients(lambda: np.sum(v**3)),
            lambda: gradients(lambda: np.sum(w), [w], return_loss=True),
            lambda: DESCENT.minimize(lambda: np.sum(w)),
        ):
            with pytest.raises(NotImplementedError, match=r"inside a loss.*create_graph"):
                inner()
        return total

    assert gradients(loss)[0].tolist() == [2.0, 4.0, 6.0]
    assert w.numpy()[0, 0] == 1


def test_a_value_of_an_earlier_loss_is_a_constant(v):
    kept = []
    gradients(lambda: kept.append(v * 2) or np.sum(kept[-1]))
    assert (kept[0] + 1).tolist() == [3.0, 5.0, 7.0], "plain arithmetic"
    assert gradients(lambda: np.sum(kept[0] * v))[0].tolist() == [2.0, 4.0, 6.0]
    assert gradients(lambda: np.sum(kept[0]), [v]) == [None]


# -- writing inside a loss ------------------------------------------------------------------------


def test_what_a_loss_has_read_is_not_written_inside_it(v, w):
    """The tape refers to the memory of the Variable: the gradient would use the new value."""
    before = v.numpy()
    for write in (
        lambda: v.assign([7.0, 8.0, 9.0]),
        lambda: v.assign_add([7.0, 8.0, 9.0]),
        lambda: DESCENT.apply_gradients([(np.ones((3, 2), "float32"), w), (before, v)]),
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


def test_variables_that_a_loss_reads_as_constants_may_be_written(v, w):
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


@contextmanager
def without_gc():
    """Objects are freed by reference counting alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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

    with without_gc():
        assert np.allclose(gradients(loss)[0], 8 * (1 - np.tanh(v.numpy() * 2) ** 2))
    assert len(alive) == 4


# -- faults ---------------------------------------------------------------------------------------


class InjectedError(RuntimeError):
    """The failure that a test plants."""


def test_an_exception_in_a_loss_frees_its_values(v):
    alive = []

    def loss():
        hidden = v * 2
        alive.append(weakref.ref(hidden.value))
        raise InjectedError

    def late():
        yield np.sum(v * 2)
        raise InjectedError

    with without_gc():
        for faulty in (loss, late):
            with suppress(InjectedError):  # pytest.raises would keep the frames
                gradients(faulty)
                pytest.fail("nothing was raised")
            assert current_reader() is None
            assert isinstance(v * 2, np.ndarray)
        assert [each() for each in alive] == [None]
    assert gradients(lambda: np.sum(v * v))[0].tolist() == [2.0, 4.0, 6.0]


SECONDS = 30


def test_a_thread_of_a_loss_reads_plain_values():
    """A loss belongs to one thread; a thread that it starts computes without a tape."""
    with gr.open_mesh(1, backend="sim") as mesh, ThreadPoolExecutor(1) as pool:
        x = gr.Variable([1.0, 2.0], device=mesh)

        def loss():
            other = pool.submit(lambda: x * 2).result(SECONDS)
            assert type(other) is np.ndarray
            return np.sum(other * x)

        assert gradients(loss)[0].tolist() == [2.0, 4.0]
