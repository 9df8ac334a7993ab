"""The state after Ctrl-C, an error, a failure or a checkpoint during a call."""

import contextlib
import threading
import time

import numpy as np
import pytest
from optim.agn.team import one_variable

import gradreduce as gr
from gradreduce.arrays import variable
from gradreduce.errors import BackendUnavailableError, CollectiveError

LIMIT_S = 30.0
ONE = np.ones(2, "float32")


@pytest.fixture
def own():
    """Devices of this test alone."""
    with gr.open_mesh(2, backend="sim") as mesh:
        yield mesh


def reached(condition):
    """Waits for threads, which take milliseconds."""
    waiting, end = threading.Event(), time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "deadlock"
        waiting.wait(0.001)


def stop(*_):
    raise KeyboardInterrupt


def test_a_push_that_is_stopped_before_it_counts_is_not_made_again(own, monkeypatch):
    getter, var, optimizer = one_variable(own)
    monkeypatch.setattr("gradreduce.optim.agn.worker.ready_count", lambda _: stop)
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients([(ONE, var)])
    monkeypatch.undo()
    with pytest.raises(CollectiveError, match="only partly updated: a push failed part-way"):
        optimizer.apply_gradients([(ONE, var)])
    assert (getter.center_variable(var).numpy() == -1).all()


@pytest.mark.parametrize("rows", [False, True])
def test_a_step_that_is_stopped_before_it_counts_fails_the_device(own, monkeypatch, rows):
    _, var, optimizer = one_variable(own, period=9)
    gradient = gr.IndexedSlices(np.ones(1, "float32"), [0], (2,)) if rows else ONE
    for _ in range(2):  # which are worked out once
        optimizer.apply_gradients([(gradient, var)])
    monkeypatch.setattr(optimizer._inner._slots, "commit", stop)
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients([(gradient, var)])
    assert optimizer._worker.variables.num_steps == 2
    with pytest.raises(BackendUnavailableError, match="failed half way: KeyboardInterrupt"):
        var.numpy()


def test_ctrl_c_after_a_step_does_not_separate_its_plan_and_its_sums(own, monkeypatch):
    getter, var, optimizer = one_variable(own, period=9)
    optimizer.apply_gradients([(ONE, var)])
    optimizer.get_init_op(0)()
    launch = optimizer._inner._launch
    monkeypatch.setattr(optimizer._inner, "_launch", lambda *given: (launch(*given), stop()))
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients([(gr.IndexedSlices(ONE[:1], [0], (2,)), var)])
    monkeypatch.undo()
    optimizer.apply_gradients([(ONE, var)])
    assert getter.accumulation(var).numpy().tolist() == [2, 1]


@pytest.mark.parametrize("is_agn", [True, False])
def test_the_slots_of_a_first_step_that_was_made_stay(own, monkeypatch, is_agn):
    _, var, optimizer = one_variable(own, gr.AdamOptimizer(), period=9)
    if not is_agn:
        var, optimizer = gr.Variable(ONE, device=own.devices[0]), gr.AdamOptimizer()
    slots = optimizer._inner._slots if is_agn else optimizer._slots
    counted = slots.commit
    monkeypatch.setattr(slots, "commit", lambda powers: (counted(powers), stop()))
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients([(ONE, var)])
    assert optimizer.get_slot_names() == ["m", "v"]
    with pytest.raises(BackendUnavailableError, match="failed half way: KeyboardInterrupt"):
        var.numpy()


def test_what_counts_a_push_is_compiled_before_anything_is_changed(own, monkeypatch):
    getter, var, optimizer = one_variable(own)
    plain, free = gr.AdamOptimizer(), gr.Variable(ONE, device=own.devices[0])
    step = gr.Variable(0, "step", trainable=False, device=own.devices[1])

    def refuse(*_):
        raise MemoryError("no compiler")

    monkeypatch.setattr(variable, "compile_rows", refuse)
    for each, target in ((optimizer, var), (plain, free)):
        with pytest.raises(MemoryError):
            each.apply_gradients([(ONE, target)], step)
        assert each.get_slot_names() == []
    monkeypatch.undo()
    assert (free.numpy() == 1).all()
    assert not getter.center_variable(var).numpy().any()
    assert not var.numpy().any()
    assert optimizer.local_step.numpy() == step.numpy() == 0
    assert optimizer.apply_gradients([(ONE, var)], step) is True
    assert step.numpy() == 1


def test_nothing_that_a_loss_has_read_is_written_in_it(mesh):
    getter, var, optimizer = one_variable(mesh)
    center = getter.center_variable(var)
    free = gr.Variable(ONE, device=mesh.devices[0])
    step = gr.Variable(np.float32(1), "step", trainable=False, device=mesh.devices[0])

    def by(write, read):
        def loss():
            value = np.sum(free * read)
            with pytest.raises(RuntimeError, match="inside a loss that has read it"):
                write()
            return value

        return gr.GradientDescentOptimizer(1.0).compute_gradients(loss, [free])

    for write, read in (
        (lambda: optimizer.apply_gradients([(ONE, var)], step), step),
        (lambda: optimizer.apply_gradients([(ONE, var)]), center),
        (optimizer.get_init_op(0), var),
    ):
        ((gradient, _),) = by(write, read)
        assert (gradient == read.numpy()).all()
    assert optimizer.local_step.numpy() == 0
    assert not center.numpy().any()


@pytest.mark.parametrize(("period", "wanted"), [(1, -6.3125), (2, -2.75)])
def test_a_rule_that_is_changed_is_changed_at_the_center_too(mesh, period, wanted):
    inner = gr.MomentumOptimizer(1.0, 0.5)
    _, var, optimizer = one_variable(mesh, inner, period)
    for turn in range(4):
        inner.use_nesterov = turn >= 2
        optimizer.apply_gradients([(ONE, var)])
    assert (var.numpy() == wanted).all()


def test_a_thread_that_failed_keeps_nothing_of_its_training(mesh):
    seen: list[float] = []

    def train(start):
        near = gr.AGNCustomGetter(mesh.devices[0])

        def read():
            getter = gr.AGNCustomGetter(mesh.devices[0])
            var = gr.get_variable("w", np.full(2, start), custom_getter=getter)
            seen.append(getter.center_variable(var).numpy()[0])
            raise ValueError("because of it")

        def work():
            try:
                read()
            except ValueError as error:
                raise RuntimeError("once") from error

        thread = near.center.start_worker(0, work)
        if start == 1:
            with contextlib.suppress(RuntimeError):
                thread.join(LIMIT_S)
        else:
            threading.Thread.join(thread, LIMIT_S)
        return thread

    kept = [train(start) for start in (1.0, 2.0, 3.0)]
    assert seen == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"agn-worker-0 failed with RuntimeError: once; an"):
            kept[0].join()
    with pytest.raises(RuntimeError, match=r"^once"):
        kept[1].join()


def test_a_wait_notices_a_worker_that_fails_at_once(mesh):
    center = gr.AGNCenter(mesh)
    center._shared.registry.begin(1)
    waiting = center.start_worker(1, lambda: center._shared.registry.wait_for(2, LIMIT_S))
    with center._shared.registry.lock:
        center._shared.registry.begin(0)
        center._shared.registry.mark_failed(0, ValueError("gone"))
    waiting.join(LIMIT_S)
    assert center.failed_workers == (0,)


def test_a_wait_notices_a_round_that_ends_at_once(mesh):
    center = gr.AGNCenter(mesh)
    waiting = center.start_worker(2, lambda: center._shared.registry.wait_for(2, LIMIT_S))
    reached(lambda: center._shared.registry._waiters._waiters)
    with center._shared.registry.lock:
        for call in (center._shared.registry.begin, center._shared.registry.end):
            call(0)
            call(1)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
