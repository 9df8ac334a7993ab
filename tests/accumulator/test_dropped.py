"""A stale gradient is checked and dropped: no Buffer, no copy, no launch."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator import multi, state
from gradreduce.errors import (
    BackendUnavailableError,
    CancelledError,
    DeviceMismatchError,
    InvalidArgumentError,
)

ROWS = gr.IndexedSlices(np.ones((2, 3), np.float32), [1, 0], (4, 3))


@pytest.fixture
def queued():
    """A mesh with a queue, which must upload host arrays because it cannot share them."""
    with gr.open_mesh(2, backend="sim", schedule_seed=0) as mesh:
        yield mesh


def dense(device, **options):
    acc = gr.ConditionalAccumulator("float32", (4, 3), device=device, **options)
    acc.set_global_step(5)
    return acc


def sparse(device):
    acc = gr.SparseConditionalAccumulator("float32", (4, 3), device=device)
    acc.set_global_step(5)
    return acc


ONES = np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    ("make", "grad"),
    [
        *[(dense, each) for each in (ONES, np.ones((4, 6), np.float32)[:, ::2], [[1, 2, 3]] * 4)],
        *itertools.product((dense, sparse), (ROWS, None)),
    ],
)
def test_a_dropped_gradient_submits_no_device_work(queued, make, grad):
    """An array, also in pieces, a list, rows, or rows from each replica of a mesh."""
    acc = make(queued.devices[1] if grad is not None else queued)
    grad = gr.PerReplica([ROWS, ROWS], queued) if grad is None else grad
    with queued.journal() as journal:
        assert gr.apply_grads([acc], [grad], 4) is False
        assert journal.records == []
        assert gr.apply_grads([acc], [grad], 5)
        assert journal.uploads > 0
    count = 2 if isinstance(grad, gr.PerReplica) else 1
    assert (acc.num_dropped, acc.num_accumulated()) == (count, count)


def test_all_gradients_are_validated_before_any_is_dropped(queued):
    first, second = dense(queued.devices[0]), dense(queued.devices[0])
    good = np.ones((4, 3), np.float32)
    for bad, error in [
        (good.astype(np.float64), "float64"),
        (good[:2], "incompatible"),
        ([["no"] * 3] * 4, "numbers"),
        (gr.IndexedSlices(good[:, :2], [0, 1, 2, 3], (4, 2)), "incompatible"),
    ]:
        with pytest.raises(ValueError, match=error):
            gr.apply_grads([first, second], [good, bad], 4)
    with pytest.raises(TypeError):
        first.apply_grad(object(), 4)
    with gr.open_mesh(1, backend="sim") as other, pytest.raises(DeviceMismatchError):
        first.apply_grad(other.devices[0].put(good), 4)
    rows = sparse(queued.devices[0])
    with pytest.raises(InvalidArgumentError, match="exceeded limits"):
        rows.apply_grad([4], good[:1], local_step=4)
    assert [acc.num_dropped for acc in (first, second, rows)] == [0, 0, 0]


def test_closed_and_failed_accumulators_count_no_drop(queued):
    closed, lost = dense(queued.devices[0]), dense(queued.devices[1])
    grad = np.ones((4, 3), np.float32)
    closed.close()
    with pytest.raises(CancelledError):
        closed.apply_grad(grad, 4)
    queued.devices[1].mark_failed("planted")
    with pytest.raises(BackendUnavailableError, match="planted"):
        lost.apply_grad(grad, 4)
    assert (closed.num_dropped, lost.num_dropped) == (0, 0)


def test_a_gradient_that_is_no_longer_stale_is_added(queued, monkeypatch):
    """The step is lowered between the first check, which takes no lock, and the decision."""
    acc = dense(queued.devices[0])
    hold_locks = multi.hold_locks

    def late(states):
        if acc.global_step == 5:
            acc.set_global_step(4)
        return hold_locks(states)

    monkeypatch.setattr(multi, "hold_locks", late)
    assert acc.apply_grad(np.ones((4, 3), np.float32), 4)
    assert (acc.num_dropped, acc.num_accumulated()) == (0, 1)


def test_every_replica_of_a_gradient_that_becomes_stale_is_counted(queued, monkeypatch):
    """The step is raised between the first check, which takes no lock, and the decision."""
    acc = dense(queued)
    first_look = iter([False])
    really = multi.is_stale
    monkeypatch.setattr(multi, "is_stale", lambda *about: next(first_look, None) or really(*about))
    assert not acc.apply_grad(gr.PerReplica([np.ones((4, 3), np.float32)] * 2, queued), 4)
    assert (acc.num_dropped, acc.num_accumulated()) == (2, 0)


def test_done_waits_like_a_threading_event():
    done = state.Done()
    assert not done.wait(0)
    assert not done.is_set()
    waiting = [threading.Thread(target=done.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    done.set()
    done.set()
    for thread in waiting:
        thread.join(30)
    assert not any(thread.is_alive() for thread in waiting), "only one was let go"
    assert done.wait()
    assert done.is_set()


def test_the_first_drop_with_the_default_local_step_warns(queued, caplog):
    grad, device = np.ones((4, 3), np.float32), queued.devices[0]
    accs = [dense(device, name=name) for name in ("a/w", "b")] + [sparse(device)]
    calls = [
        lambda *step: accs[0].apply_grad(grad, *step),
        lambda *step: gr.apply_grads(iter(accs[:2]), [grad, grad], *step),
        lambda *step: accs[2].apply_grad([1], grad[:1], None, *step),
        lambda *step: accs[2].apply_indexed_slices_grad(ROWS, *step),
    ]
    for step in (0, np.int64(0)):
        assert [call(step) for call in calls] == [False] * 4
    assert caplog.records == []
    told = []
    for call in calls * 2:
        assert call() is False
        told.append(len(caplog.records))
    assert told == [1, 2, 3, 3, 3, 3, 3, 3]
    assert caplog.messages[0] == (
        "accumulator 'w' is at step 5 and dropped a gradient without local_step, which defaults "
        "to 0: pass local_step=accumulator.global_step, read before the gradient was computed"
    )
    assert caplog.messages[1].startswith("accumulator 'b' is at step 5")
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert [acc.num_dropped for acc in accs] == [8, 4, 8]


def test_the_default_local_step_of_a_new_accumulator_does_not_warn(queued, caplog):
    acc = gr.ConditionalAccumulator("float32", (4, 3), device=queued.devices[0])
    assert acc.apply_grad(ROWS)
    assert caplog.records == []
