"""Ctrl-C at the worst moments: counts stay right, and no take or lock remains."""

import threading

import pytest
from support.signal_injection import SignalInjection, ctrl_c, interrupted_at, num_points_of
from support.take_now import take_now

import gradreduce as gr
from gradreduce.accumulator import multi
from gradreduce.accumulator.state import PendingTake, hold_locks
from gradreduce.accumulator.take_queue import join


@pytest.fixture
def own():
    """A device that may fail."""
    with gr.open_mesh(1, backend="sim", strict=True) as mesh:
        yield mesh.devices[0]


class InterruptedEvent(threading.Event):
    """An event whose waiter is interrupted."""

    def wait(self, timeout=None):
        raise KeyboardInterrupt


@pytest.mark.parametrize("num_accumulators", [1, 2])
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
