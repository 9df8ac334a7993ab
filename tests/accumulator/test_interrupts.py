"""Ctrl-C at the worst moments: counts stay right, and no take or lock remains."""

from __future__ import annotations

import functools
import random
import signal
import threading

import numpy as np
import pytest
from support.signal_injection import SignalInjection, ctrl_c, interrupted_at, num_points_of

import gradreduce as gr
from gradreduce.accumulator import multi
from gradreduce.accumulator.multi import take_now
from gradreduce.accumulator.state import AccumulatorState, PendingTake, hold_locks
from gradreduce.accumulator.take_queue import join
from gradreduce.errors import BackendUnavailableError


def raise_interrupt(*args, **options):
    raise KeyboardInterrupt


@pytest.fixture
def own():
    """A device that may fail."""
    with gr.open_mesh(1, backend="sim", strict=True) as mesh:
        yield mesh.devices[0]


KINDS = {
    "dense": (gr.ConditionalAccumulator, lambda acc, value: acc.apply_grad([value])),
    "sparse": (
        gr.SparseConditionalAccumulator,
        lambda acc, value: acc.apply_grad([3], [[value]]),
    ),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request, own):
    made, apply = request.param
    return made("float32", device=own, reduction_type="SUM"), apply


def taken_sum(acc):
    taken = acc.take_grad(1, timeout=0)
    return (taken[1] if isinstance(taken, tuple) else taken).sum()


def test_ctrl_c_after_the_launch_of_a_first_gradient(kind):
    """The new sum is freed, because no state refers to it."""
    acc, apply = kind
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AccumulatorState, "update", raise_interrupt)
        apply(acc, 7.0)
    assert acc.num_accumulated() == 0
    assert apply(acc, 100.0)
    assert taken_sum(acc) == 100


def test_ctrl_c_after_the_launch_of_a_later_gradient(kind):
    """The gradient is in the sum but not counted, so the sum must not be used."""
    acc, apply = kind
    apply(acc, 7.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(AccumulatorState, "update", raise_interrupt)
        apply(acc, 100.0)
    assert "half way" in caught.value.__notes__[0]
    with pytest.raises(BackendUnavailableError, match="half way"):
        acc.take_grad(1)


def test_ctrl_c_after_the_division_of_a_take(own, monkeypatch):
    """The sum is divided and its count is still two, so it would be divided again."""
    acc = gr.ConditionalAccumulator("float32", device=own)
    acc.apply_grad([2.0])
    acc.apply_grad([4.0])
    with monkeypatch.context() as patch:
        patch.setattr(AccumulatorState, "update", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            acc.take_grad(2)
    with pytest.raises(BackendUnavailableError, match="half way"):
        acc.take_grad(2)


def test_ctrl_c_after_an_out_of_place_division_does_not_change_the_sum(own, monkeypatch):
    acc = gr.ConditionalAccumulator("float16", device=own)
    acc.apply_grad([2.0])
    acc.apply_grad([4.0])
    with monkeypatch.context() as patch:
        patch.setattr(AccumulatorState, "update", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            acc.take_grad(2)
    assert not acc.accumulator_ref.queue
    assert acc.take_grad(2, timeout=0).tolist() == [3.0]


class InterruptedEvent(threading.Event):
    """An event whose waiter is interrupted."""

    def wait(self, timeout=None):
        raise KeyboardInterrupt


def test_a_second_ctrl_c_during_the_first_is_deferred(own, monkeypatch):
    """The second Ctrl-C is deferred until the take has left its queues."""
    acc, other = (gr.ConditionalAccumulator("float32", device=own) for _ in range(2))
    leave = PendingTake.leave

    def leave_interrupted(pending_take):
        ctrl_c()
        leave(pending_take)

    with monkeypatch.context() as patch:
        patch.setattr(
            multi, "PendingTake", functools.partial(multi.PendingTake, done=InterruptedEvent())
        )
        patch.setattr(PendingTake, "leave", leave_interrupted)
        with pytest.raises(KeyboardInterrupt):
            gr.take_grads([acc, other], 1)
    assert not acc.accumulator_ref.queue
    assert not other.accumulator_ref.queue
    gr.apply_grads([acc, other], [[5.0], [6.0]])
    assert acc.take_grad(1, timeout=0).tolist() == [5.0]
    assert other.take_grad(1, timeout=0).tolist() == [6.0]


@pytest.mark.parametrize("num_accumulators", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_ctrl_c_at_once_leave_no_take_behind(own, num_accumulators, monkeypatch):
    """The second comes at each point of a take, also while the first one withdraws it."""
    accs = [gr.ConditionalAccumulator("float32", device=own) for _ in range(num_accumulators)]
    raised = []  # their tracebacks keep the frames of the calls

    def take():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            patch.setattr(
                multi, "PendingTake", lambda *args: PendingTake(*args, done=InterruptedEvent())
            )
            with injection:
                gr.take_grads(accs, 1)
        raised.append(caught.value)

    injection = SignalInjection(0, ctrl_c)
    take()
    for place in range(1, injection.points + 1):
        injection = SignalInjection(place, ctrl_c)
        take()
        assert gr.apply_grads(accs, [[place]] * num_accumulators, place - 1)
        assert gr.take_grads(accs, 1, timeout=0) == [[place]] * num_accumulators
    assert len(raised) > 50


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 100), *[pytest.param(seed, 300, marks=pytest.mark.exhaustive) for seed in range(1, 11)]],
)
def test_two_real_ctrl_c_within_microseconds(own, seed, count):
    accs = [gr.ConditionalAccumulator("float32", device=own) for _ in range(2)]
    moments, fired = random.Random(seed), []

    def fire(*_):
        fired.append(True)
        if len(fired) == 1:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 4e-5))
        ctrl_c()

    def interrupted_take(waited_for):
        fired.clear()
        try:
            try:
                # Again after 10 ms: CPython may start to wait before it handles a signal.
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 3e-4), 1e-2)
                gr.take_grads(waited_for, 1)
            except KeyboardInterrupt:
                while len(fired) == 1:  # the second one comes here or came in the call
                    pass
        except KeyboardInterrupt:
            pass

    before = signal.signal(signal.SIGALRM, fire)
    try:
        for step in range(count):
            interrupted_take(accs[: 1 + step % 2])
            assert len(fired) == 2
            assert gr.apply_grads(accs, [[step], [-step]], step)
            assert gr.take_grads(accs, 1, timeout=0) == [[step], [-step]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_calls_do_not_wait_for_a_take_whose_call_has_ended(own):
    acc, other = (gr.ConditionalAccumulator("float32", device=own) for _ in range(2))
    states = acc.accumulator_ref, other.accumulator_ref
    gone, waiting = PendingTake(states[1:], 2), PendingTake(states, 1)
    other.apply_grad([5.0])
    waiting.in_call.acquire()
    with gone.in_call:
        join(gone)
        join(waiting)
    acc.apply_grad([6.0])
    assert waiting.done.is_set()
    assert not gone.done.is_set()
    join(gone)
    other.apply_grad([7.0], local_step=1)
    assert take_now([other], 1)[0].tolist() == [7.0]


def test_ctrl_c_while_many_locks_are_acquired(own):
    """It comes when all are locked; afterwards none is locked."""
    states = [gr.ConditionalAccumulator("float32", device=own).accumulator_ref for _ in range(3)]
    entered = []

    def hold():
        with hold_locks(states):
            entered.append(True)

    for place in range(1, num_points_of(hold)):
        assert interrupted_at(place, hold)[0]
        assert not any(state.lock._is_owned() for state in states), place
    assert entered


def test_ctrl_c_after_the_all_reduce_of_a_take():
    """The sums are reduced in place and still counted, so they would be reduced again."""
    with gr.open_mesh([0, 0, 1, 1], backend="sim") as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh)
        acc.apply_grad(gr.PerReplica([np.full(1, 2, "float32")] * 4, mesh))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(AccumulatorState, "update", raise_interrupt)
            acc.take_grad(4)
        with pytest.raises(BackendUnavailableError, match="half way"):
            acc.take_grad(4, timeout=0)
