"""If anything fails in a sparse call, nothing has changed, or the devices have failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from support.accumulator_states import frozen

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError

METHODS = ("_allocate", "_upload", "_copy", "_launch")


class InjectedError(RuntimeError):
    """The failure that a test plants."""


@contextlib.contextmanager
def failing_at(mesh, number, methods=METHODS, times=1):
    """Makes the n-th operation of the devices fail, from 1 on; yields the names of all tried."""
    tried = []

    def counted(real, name):
        def run(*args):
            tried.append(name)
            if number <= len(tried) < number + times:
                raise InjectedError(name)
            return real(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for device in mesh.devices:
            for method in methods:
                patch.setattr(device, method, counted(getattr(device, method), method[1:]))
        yield tried


def rows(indices, dtype="float32", value=1.0):
    return gr.IndexedSlices(np.full((len(indices), 2), value, dtype), indices)


def sparse(home, *gradients, dtype="float32"):
    acc = gr.SparseConditionalAccumulator(dtype, device=home)
    for each in gradients:
        acc.apply_indexed_slices_grad(each)
    return acc


def dense(home, *gradients):
    acc = gr.ConditionalAccumulator("float32", device=home)
    for each in gradients:
        acc.apply_grad(each)
    return acc


# -- what is made to fail: the accumulators, and the call -----------------------------------------


def first(mesh):
    acc = sparse(mesh.devices[1])
    return [acc], lambda: acc.apply_indexed_slices_grad(rows([3, 1, 3]))


def later(mesh):
    acc = sparse(mesh.devices[1], rows([1, 2, 3]))
    return [acc], lambda: acc.apply_indexed_slices_grad(rows([3, 1, 3]))


def grows(mesh):
    acc = sparse(mesh.devices[1], rows([1, 2]))
    return [acc], lambda: acc.apply_indexed_slices_grad(rows([3, 1, 3]))


def casts(mesh):
    acc = sparse(mesh.devices[1], rows([1, 3]))
    return [acc], lambda: acc.apply_indexed_slices_grad(rows([3, 1], "float16"), cast=True)


def several(mesh, sums, terms):
    home = mesh.devices[1]
    accumulators = [sparse(home, *sums), dense(home, *[np.ones(4, "float32")] * len(sums))]
    far = mesh.devices[2].upload(np.ones(4, "float32"))
    return accumulators, lambda: gr.apply_grads(accumulators, [rows(terms), far])


def several_first(mesh):
    return several(mesh, [], [3, 1])


def several_later(mesh):
    return several(mesh, [rows([3, 1])], [1, 3])


def several_grow(mesh):
    return several(mesh, [rows([1])], [1, 3])


def replicas(mesh, indices):
    return gr.PerReplica([rows([place, *indices]) for place in range(3)], mesh)


def across_first(mesh):
    acc, given = sparse(mesh), replicas(mesh, [4, 5])
    return [acc], lambda: acc.apply_indexed_slices_grad(given)


def across_later(mesh):
    acc, given = sparse(mesh, replicas(mesh, [4, 5])), replicas(mesh, [5])
    return [acc], lambda: acc.apply_indexed_slices_grad(given)


def new_and_old(mesh):
    """On the second GPU in place, and on the first into new memory, which is launched first."""
    acc, given = sparse(mesh[[2, 0]]), replicas(mesh, [])
    with gr.replica(2):
        acc.apply_indexed_slices_grad(rows([1, 2]))
    return [acc], lambda: acc.apply_indexed_slices_grad(given)


def takes(mesh):
    acc = sparse(mesh.devices[1], rows([3, 1]), rows([1]))
    return [acc], lambda: acc.take_grad(2)


def takes_over_a_mesh(mesh):
    acc = sparse(mesh, replicas(mesh, [4, 5]))
    return [acc], lambda: acc.take_grad(3)


def takes_both(mesh):
    """Sparse sums are merged out of place; dense sums are divided in place, so they come last."""
    accumulators = [dense(mesh.devices[1], *np.ones((2, 4), "float32")),
                    sparse(mesh.devices[1], rows([3, 1]), rows([1]))]  # fmt: skip
    return accumulators, lambda: gr.take_grads(accumulators, 2)


class Case(NamedTuple):
    """One call.

    Attributes:
        make: the accumulators and the call.
        work: the operations of the devices, in order; in capitals if a failure makes them fail.
        peers: whether GPUs have peer access.
    """

    make: Callable
    work: str
    peers: bool = True


PLAN = "allocate upload "
FAR = "allocate copy "
CASES = [
    Case(first, f"allocate {PLAN}launch"),
    Case(later, f"{PLAN}launch"),
    Case(grows, f"allocate launch {PLAN}launch"),
    Case(casts, f"{PLAN}launch"),
    Case(several_first, f"allocate {PLAN}allocate launch launch"),
    Case(several_first, f"allocate {PLAN}{FAR}allocate launch launch", peers=False),
    Case(several_later, f"{PLAN}launch LAUNCH"),
    Case(several_later, f"{PLAN}{FAR}launch LAUNCH", peers=False),
    Case(several_grow, f"allocate launch {PLAN}launch launch"),
    Case(across_first, f"allocate allocate allocate {PLAN}{PLAN}launch launch"),
    Case(across_later, f"{PLAN}{PLAN}launch LAUNCH"),
    Case(new_and_old, f"allocate {PLAN}{PLAN}{PLAN}launch launch LAUNCH"),
    Case(takes, f"allocate {PLAN}launch"),
    Case(takes_over_a_mesh, f"allocate launch allocate {PLAN}launch "
         "allocate allocate launch copy"),
    Case(takes_both, f"allocate {PLAN}launch launch"),
]  # fmt: skip
LOSSES = [
    pytest.param(case, number, id=f"{case.make.__name__}{'' if case.peers else '-no-peers'}")
    for case in CASES
    for number, name in enumerate(case.work.split(), 1)
    if name.isupper()
]


def opened(case, implementation):
    return gr.open_mesh(
        [0, 0, 1], backend="sim", kernels=implementation, strict=True, peer_access=case.peers
    )


def contents(taken):
    """A result in a form that compares with ``==``."""
    if isinstance(taken, list | tuple):
        return [contents(each) for each in taken]
    if isinstance(taken, gr.IndexedSlices):
        return taken.indices.tolist(), taken.values.tolist(), taken.dense_shape
    if isinstance(taken, gr.Mirrored):
        return [contents(each) for each in taken.values]
    return taken.tolist() if isinstance(taken, np.ndarray) else taken


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.make.__name__}{'' if case.peers else '-no-peers'}"
)
def test_any_failure_leaves_the_state_unchanged(implementation, case):
    """Each operation of the call fails once, one after the other; then the call succeeds."""
    with opened(case, implementation) as mesh:
        accumulators, call = case.make(mesh)
        before = [frozen(acc) for acc in accumulators]
        for number, name in enumerate(case.work.split(), 1):
            if name.isupper():
                continue
            with failing_at(mesh, number), pytest.raises(InjectedError, match=name) as caught:
                call()
            assert getattr(caught.value, "__notes__", []) == []
            assert [frozen(acc) for acc in accumulators] == before, (number, name)
            assert not any(acc.accumulator_ref.queue for acc in accumulators)
        with failing_at(mesh, 0) as tried:
            found = call()
        assert tried == case.work.lower().split()
        others, call = case.make(mesh)
        assert contents(call()) == contents(found)
        assert [frozen(acc) for acc in others] == [frozen(acc) for acc in accumulators]


@pytest.mark.parametrize(("case", "number"), LOSSES)
def test_a_partly_written_accumulator_cannot_be_used(implementation, case, number):
    with opened(case, implementation) as mesh:
        accumulators, call = case.make(mesh)
        counts = [acc.num_accumulated() for acc in accumulators]
        with failing_at(mesh, number), pytest.raises(InjectedError) as caught:
            call()
        assert "cannot be used any more" in caught.value.__notes__[0]
        for acc in accumulators:
            for use in (lambda acc=acc: acc.take_grad(1), acc.state_dict):
                with pytest.raises(BackendUnavailableError, match="failed half way"):
                    use()
        assert [acc.num_accumulated() for acc in accumulators] == counts
        assert [acc.num_dropped for acc in accumulators] == [0] * len(accumulators)


# -- takes that another call serves ---------------------------------------------------------------


TAKE = ("_allocate", "_upload", "_launch")  # in this order, the last that an apply and a take use


@pytest.fixture
def home(implementation):
    with gr.open_mesh([0, 0, 1], backend="sim", kernels=implementation, strict=True) as mesh:
        yield mesh


@pytest.mark.parametrize("number", [4, 5, 6, 7])
def test_a_take_that_another_threads_apply_completes(home, call_threads, number):
    """The consumer gets the error, the applier continues, and the next take is checked."""
    acc = sparse(home.devices[1])
    heads = [call_threads.waiting(acc.take_grad, num_required) for num_required in (2, 2, 1)]
    acc.apply_indexed_slices_grad(rows([3, 1]))
    with failing_at(home, number, TAKE) as tried:
        assert acc.apply_indexed_slices_grad(rows([1, 3], value=3.0)) is True
    assert tried[:3] == ["allocate", "upload", "launch"], "its own are right"
    assert [head.is_done for head in heads] == [True, True, False]
    with pytest.raises(InjectedError):
        heads[0].result()
    indices, values, shape = heads[1].result()
    assert (indices.tolist(), values.tolist(), shape) == ([1, 3], [[2.0] * 2] * 2, (-1, 2))
    assert (acc.num_accumulated(), acc.global_step, acc.num_dropped) == (0, 1, 0)
    acc.apply_indexed_slices_grad(rows([7]), 1)
    assert heads[2].result()[0].tolist() == [7]


def test_every_waiting_take_may_fail(home, call_threads):
    acc = sparse(home)
    heads = [call_threads.waiting(acc.take_indexed_slices_grad, 1) for _ in range(3)]
    with failing_at(home, 2, ["_launch"], times=9):  # after the launch of the apply itself
        assert acc.apply_indexed_slices_grad(rows([1, 1])) is True
    for head in heads:
        assert head.is_done
        with pytest.raises(InjectedError):
            head.result()
    taken = acc.take_indexed_slices_grad(1, timeout=0)
    assert [part.values.tolist() for part in taken.values] == [[[2.0, 2.0]]] * 3


def test_a_joint_take_that_an_apply_to_one_completes(home, call_threads):
    """The dense sum is unchanged, too, and the next take of it alone completes."""
    accumulators = sparse(home.devices[1]), dense(home.devices[1])
    both = call_threads.waiting(gr.take_grads, accumulators, 1)
    behind = call_threads.waiting(accumulators[1].take_grad, 1)
    accumulators[0].apply_indexed_slices_grad(rows([1]))
    with failing_at(home, 2, ["_launch"]):
        assert accumulators[1].apply_grad(np.ones(3, "float32")) is True
    with pytest.raises(InjectedError):
        both.result()
    assert behind.result().tolist() == [1.0] * 3
    assert [acc.num_accumulated() for acc in accumulators] == [1, 0]


# -- what is new and what is old in one call ------------------------------------------------------


def test_a_new_sum_of_several_gradients_beside_one_in_place(home):
    """The first gradient shares a launch with the other sum; the second has the next launch."""
    acc = gr.SparseConditionalAccumulator("float32", device=home[:2], reduction_type="SUM")
    with gr.replica(1):
        acc.apply_indexed_slices_grad(rows([5]))
    given = gr.PerReplica([rows([1], value=10), rows([5], value=20), rows([1], value=30)], home)
    acc.apply_indexed_slices_grad(given)
    indices, values, _ = acc.take_grad(4)
    assert indices.tolist() == [1, 5]
    assert values.primary.tolist() == [[40.0] * 2, [21.0] * 2]


def test_a_gradient_of_another_mesh_is_refused_even_if_stale(home):
    acc = sparse(home)
    acc.set_global_step(1)
    with gr.open_mesh(1, backend="sim") as other:
        values = other.devices[0].upload(np.ones((1, 2), "float32"))
        for step in (0, 1):
            with pytest.raises(gr.errors.DeviceMismatchError, match="another mesh"):
                acc.apply_grad([1], values, None, step)
    assert (acc.num_accumulated(), acc.num_dropped) == (0, 0)


def test_a_gradient_without_rows_is_refused_if_the_device_failed_or_closed(implementation):
    """They launch nothing on an existing sum, but must not be reported as added."""
    for lose in (True, False):
        with gr.open_mesh([0, 1], backend="sim", kernels=implementation) as mesh:
            acc, none = sparse(mesh, rows([1])), mesh.devices[0].upload(np.ones((0, 2), "float32"))
            if lose:
                mesh.devices[0].mark_failed("for a test")
            else:
                mesh.close()
            with pytest.raises(BackendUnavailableError, match="for a test" if lose else "closed"):
                acc.apply_grad([], none)
            assert acc.num_accumulated() == 1
