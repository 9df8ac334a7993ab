"""Steps; and gradients of earlier ones, which are checked and dropped without device work."""

import itertools
import logging
from functools import partial

import numpy as np
import pytest
from accumulator.kinds import counters

import gradreduce as gr
from gradreduce.accumulator import multi
from gradreduce.errors import InvalidArgumentError


def test_only_an_earlier_step_is_stale(accumulator):
    acc = accumulator()
    acc.set_global_step(5)
    kept = [acc.apply_grad([float(step)], step) for step in (4, 5, 6, 2**63 - 1, 0, -1, -(2**63))]
    assert kept == [False, True, True, True, False, False, False]
    assert counters(acc) == [(3, 5, 4)]


def test_a_step_may_be_a_variable_on_any_device_or_a_numpy_integer(accumulator, device):
    """Its value is read on this device, on another, on a whole mesh, and on another mesh."""
    acc = accumulator()
    with gr.open_mesh(3, backend="sim") as other:
        homes = device, device.mesh.devices[0], device.mesh, other
        dtypes = "int64", "int32", "uint8", "int64"
        for value, (home, dtype) in enumerate(zip(homes, dtypes, strict=True), 1):
            step = gr.Variable(value, trainable=False, dtype=dtype, device=home)
            acc.set_global_step(step)
            assert acc.global_step == value
            assert acc.apply_grad([1.0], step)
            assert not acc.apply_grad([1.0], np.int64(value - 1))
            with gr.replica(1):
                step.assign_add(1)
                assert acc.global_step == value, "the value is read, the Variable is not kept"
                acc.set_global_step(step)
            assert acc.global_step == value + 1
        acc.set_global_step(np.array(7, "int32"))
        assert (type(acc.global_step), acc.global_step) == (int, 7)


def test_a_step_is_an_integer_of_64_bits(accumulator, device):
    acc = accumulator()
    acc.set_global_step(-(2**63))
    large = [2**63, -(2**63) - 1, 10**30, np.uint64(2**63)]
    large.append(gr.Variable(large[-1], trainable=False, device=device))
    others = [0.0, 0.9, np.float32(1), "1", None, [1], np.array([1]), 1j]
    others += [gr.Variable(each, trainable=False, device=device) for each in (1.0, [1, 2])]
    for steps, error, text in (
        (large, InvalidArgumentError, r"=-?\d+ does not fit in int64"),
        (others, TypeError, ""),
    ):
        for step in steps:
            with pytest.raises(error, match=f"^local_step{text}"):
                acc.apply_grad([1.0], step)
            with pytest.raises(error, match=f"^new_global_step{text}"):
                acc.set_global_step(step)
    assert counters(acc) == [(0, -(2**63), 0)]


def test_a_lower_step_warns_and_takes_effect(accumulator, call_threads):
    """No lock is held then: another thread can use the accumulator. A load does not warn."""
    acc, seen = accumulator(), []
    state = acc.state_dict()

    class Handler(logging.Handler):
        def emit(self, record):
            others = call_threads.start(counters, acc).result()
            seen.append((record.levelname, record.getMessage(), others))

    logger, handler = logging.getLogger("gradreduce"), Handler()
    logger.addHandler(handler)
    try:
        for step in (3, 3, 5, 2, -4):
            call_threads.start(acc.set_global_step, step).result()
        acc.set_global_step(7)
        acc.load_state_dict(state)
    finally:
        logger.removeHandler(handler)
    text = "Attempt to set current_global_step_ to smaller value: current {} >= new {}"
    assert seen == [
        ("WARNING", text.format(5, 2), [(0, 2, 0)]),
        ("WARNING", text.format(2, -4), [(0, -4, 0)]),
    ]
    assert acc.global_step == 0


# -- stale gradients ------------------------------------------------------------------------------

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


@pytest.mark.parametrize("later", [4, 6])
def test_a_step_that_changes_after_the_first_look_decides(queued, monkeypatch, later):
    """The first look takes no lock. Every replica is counted, as dropped or as added."""
    acc = dense(queued)
    acc.set_global_step(10 - later)
    hold_locks = multi.hold_locks

    def late(states):
        monkeypatch.undo()
        acc.set_global_step(later)
        return hold_locks(states)

    monkeypatch.setattr(multi, "hold_locks", late)
    is_added = later == 4
    assert acc.apply_grad(gr.PerReplica([ONES] * 2, queued), 5) is is_added
    assert (acc.num_dropped, acc.num_accumulated()) == ((0, 2) if is_added else (2, 0))


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
