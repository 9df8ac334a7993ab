"""A stale gradient is checked and dropped: no Buffer, no copy, no launch."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator import multi

ONES = np.ones((4, 3), np.float32)
ROWS = gr.IndexedSlices(np.ones((2, 3), np.float32), [1, 0], (4, 3))


@pytest.fixture
def queued():
    """A mesh with a queue, which must upload host arrays because it cannot share them."""
    with gr.open_mesh(2, backend="sim", schedule_seed=0) as mesh:
        yield mesh


def made(cls, device, **options):
    acc = cls("float32", (4, 3), device=device, **options)
    acc.set_global_step(5)
    return acc


dense = partial(made, gr.ConditionalAccumulator)
sparse = partial(made, gr.SparseConditionalAccumulator)


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


def test_a_gradient_that_is_no_longer_stale_is_added(queued, monkeypatch):
    """The step is lowered between the first check, which takes no lock, and the decision."""
    acc = dense(queued.devices[0])
    hold_locks = multi.hold_locks

    def late(states):
        if acc.global_step == 5:
            acc.set_global_step(4)
        return hold_locks(states)

    monkeypatch.setattr(multi, "hold_locks", late)
    assert acc.apply_grad(ONES, 4)
    assert (acc.num_dropped, acc.num_accumulated()) == (0, 1)


def test_every_replica_of_a_gradient_that_becomes_stale_is_counted(queued, monkeypatch):
    """The step is raised between the first check, which takes no lock, and the decision."""
    acc = dense(queued)
    first_look = iter([False])
    really = multi.is_stale
    monkeypatch.setattr(multi, "is_stale", lambda *about: next(first_look, None) or really(*about))
    assert not acc.apply_grad(gr.PerReplica([ONES] * 2, queued), 4)
    assert (acc.num_dropped, acc.num_accumulated()) == (2, 0)


def test_the_first_drop_with_the_default_local_step_warns(queued, caplog):
    device = queued.devices[0]
    assert gr.ConditionalAccumulator("float32", (4, 3), device=device).apply_grad(ROWS)
    accs = [dense(device, name=name) for name in ("a/w", "b")] + [sparse(device)]
    calls = [
        lambda *step: accs[0].apply_grad(ONES, *step),
        lambda *step: gr.apply_grads(iter(accs[:2]), [ONES, ONES], *step),
        lambda *step: accs[2].apply_grad([1], ONES[:1], None, *step),
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
