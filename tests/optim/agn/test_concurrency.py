"""Concurrent calls of other workers, and the state after errors."""

import gc
import threading
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from optim.agn.team import one_variable
from support.failing_operations import fast_thread_switching

import gradreduce as gr

LIMIT_S = 30.0
ONE = np.ones(2, "float32")


def test_starts_and_checkpoints_are_consistent_snapshots(mesh):
    """All elements of a variable, and its slots, come from the same push."""
    center, ended, one = gr.AGNCenter(mesh.devices[1]), threading.Event(), np.ones(100_000, "f4")
    _, var, pushing = one_variable(mesh, gr.MomentumOptimizer(1.0, 1.0), value=one, center=center)
    _, mine, starting = one_variable(mesh, gr.MomentumOptimizer(1.0, 1.0), value=one, center=center)
    pushing.prepare([var])

    def push() -> None:
        for _ in range(100):
            pushing.apply_gradients([(one, var)])
        ended.set()

    with fast_thread_switching():
        thread, start = center.start_worker(0, push), starting.get_init_op(1)
        while not ended.is_set():
            start()
            assert np.ptp(mine.numpy()) == 0
            state = center.state_dict()
            (moment,) = state["optimizer"]["slots"]["global_center_variable/w"].values()
            assert (state["variables"]["w"] == 1 - moment * (moment + 1) / 2).all()
        thread.join(LIMIT_S)


def test_a_refused_dense_gradient_keeps_the_sum_sparse(mesh):
    found = []
    for rates in ([1.0] * 6, [*[1.0] * 5, "no number", 1.0, 1.0]):
        asked = iter(rates)  # once for a step, and once more for a communication
        getter, var, optimizer = one_variable(
            mesh, gr.MomentumOptimizer(partial(next, asked), 0.5), 2, np.zeros((3, 2), "float32")
        )
        dense = np.ones((3, 2), "float32")
        for _ in range(2):  # the center has momentum in each row, which only a dense update changes
            optimizer.apply_gradients([(dense, var)])
        rows = [gr.IndexedSlices(np.ones((1, 2), "float32"), [place], (3, 2)) for place in (0, 1)]
        optimizer.apply_gradients([(rows[0], var)])
        if len(rates) > 6:
            with pytest.raises(ValueError, match="no number"):
                optimizer.apply_gradients([(dense, var)])
        assert optimizer.apply_gradients([(rows[1], var)]) is True
        found.append(optimizer.get_slot(getter.center_variable(var), "momentum").numpy())
    assert found[0].tolist() == found[1].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    "num_loads", [80, pytest.param(4000, marks=(pytest.mark.exhaustive, pytest.mark.slow))]
)
def test_a_center_is_loaded_while_workers_step(mesh, num_loads):
    """No worker gets an error for its own gradient."""
    center, ended, stepped = gr.AGNCenter(mesh), threading.Event(), threading.Semaphore(0)
    team = [one_variable(mesh, period=1 + place % 2, center=center)[1:] for place in range(6)]
    states = [center.state_dict()]  # without slots
    for var, optimizer in team:
        optimizer.prepare([var])
    states.append(center.state_dict())

    def push(var, optimizer) -> None:
        while not ended.is_set():
            optimizer.apply_gradients([(ONE, var)])
            stepped.release()

    with fast_thread_switching(), ExitStack() as ending:
        ending.callback(ended.set)
        threads = [center.start_worker(place, partial(push, *each))
                   for place, each in enumerate(team)]  # fmt: skip
        for turn in range(num_loads):
            assert stepped.acquire(timeout=LIMIT_S)
            center.load_state_dict(states[turn % 2])
    for thread in threads:
        thread.join(LIMIT_S)
    assert center.failed_workers == ()


def test_a_push_after_a_load_goes_to_the_loaded_slots(mesh):
    """A learning rate is called twice in a step with a push, after a load too."""
    center, asked = gr.AGNCenter(mesh), []
    inner = gr.MomentumOptimizer(lambda: asked.append(1) or 1.0, 0.5)
    getter, var, optimizer = one_variable(mesh, inner, center=center)
    optimizer.apply_gradients([(ONE, var)])
    state = center.state_dict()
    optimizer.apply_gradients([(ONE, var)])
    center.load_state_dict(state)
    assert optimizer.apply_gradients([(ONE, var)]) is True
    # The loaded momentum is 1, and this push is the second after it.
    assert (optimizer.get_slot(getter.center_variable(var), "momentum").numpy() == 1.5).all()
    assert (var.numpy() == -2.5).all()
    assert optimizer.local_step.numpy() == 3
    assert len(asked) == 6


def test_a_step_after_slots_were_loaded_and_its_push_write_the_loaded_slots(mesh):
    center, workers, gradient = gr.AGNCenter(mesh), [], np.ones(2, "float16")
    for _ in range(2):
        inner = gr.MomentumOptimizer(2.0**-12, 0.5, master_dtype="float32")
        _, var, optimizer = one_variable(mesh, inner, value=gradient * 0, center=center)
        optimizer.apply_gradients([(gradient, var)])
        workers.append((inner, var, optimizer))
    inner, var, optimizer = workers[0]
    inner.load_state_dict(inner.state_dict(), [var])
    optimizer.apply_gradients([(gradient, var)])
    # The third push to the center, and the second of this worker.
    assert (optimizer.get_slot(var, "master").numpy() == -(1 + 1.5 + 1.75) * 2.0**-12).all()
    assert (optimizer.get_slot(var, "momentum").numpy() == 1.5).all()


def test_a_center_that_is_loaded_half_way_refuses_until_it_is_whole(mesh, monkeypatch):
    center = gr.AGNCenter(mesh)
    getter, var, optimizer = one_variable(mesh, center=center)
    optimizer.apply_gradients([(ONE, var)])
    state, before = center.state_dict(), getter.center_variable(var).numpy()
    with monkeypatch.context() as patch:
        patch.setattr(gr.checkpoint.StateTable, "ready", lambda *given: lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            center.load_state_dict(state)
    with pytest.raises(gr.errors.CollectiveError, match="a load_state_dict failed part-way"):
        optimizer.apply_gradients([(ONE, var)])
    center.load_state_dict(state)
    assert (getter.center_variable(var).numpy() == before).all()
    assert optimizer.apply_gradients([(ONE, var)]) is True


def test_reading_an_empty_sum_returns_other_memory(mesh):
    getter, var, optimizer = one_variable(mesh, period=2)
    optimizer.apply_gradients([(ONE, var)])
    optimizer.apply_gradients([(ONE, var)])
    shown = getter.accumulation(var).buffers
    assert (shown[0].numpy() == 0).all()
    optimizer.apply_gradients([(ONE, var)])
    assert (shown[0].numpy() == 0).all()
    assert (getter.accumulation(var).numpy() == 1).all()


def test_a_getter_and_an_inner_optimizer_have_one_owner(mesh):
    getter, _, optimizer = one_variable(mesh)
    inner = optimizer._inner
    other = gr.AGNCustomGetter(mesh.devices[0], center=gr.AGNCenter(mesh))
    for given in ((inner, 1, other), (gr.MomentumOptimizer(1.0, 0.5), 1, getter)):
        with pytest.raises(ValueError, match="is used by another AGNOptimizer"):
            gr.AGNOptimizer(*given)
    # The refused one leaves the center and the other getter free.
    assert gr.AGNOptimizer(gr.GradientDescentOptimizer(0.1), 1, other).get_slot_names() == []
    del optimizer
    gc.collect()
    assert gr.AGNOptimizer(inner, 1, getter).get_slot_names() == []
