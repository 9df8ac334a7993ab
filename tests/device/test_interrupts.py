"""Ctrl-C in a block that defers it."""

import signal
from contextlib import contextmanager
from functools import partial

import pytest
from support.signal_injection import ctrl_c, interrupted_at, num_points_of
from support.threads import in_threads

from gradreduce.device import DeferInterrupts
from gradreduce.device.failure import interrupts


@contextmanager
def handled_by(handler):
    """Inside, this is the handler of SIGINT."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def handler():
    return signal.getsignal(signal.SIGINT)


def test_ctrl_c_is_raised_when_the_block_has_ended():
    """An error of the block is its context."""
    with pytest.raises(KeyboardInterrupt) as caught, DeferInterrupts():
        ctrl_c()
        with DeferInterrupts():
            ctrl_c()  # a second signal right after it counts as the same
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)
    assert handler() is signal.default_int_handler
    with DeferInterrupts():
        pass  # it does not affect the next block


def test_at_every_place_of_the_block():
    """Wherever Ctrl-C comes, the block runs completely or not at all."""
    entered, done = [], []

    def call():
        with DeferInterrupts():
            entered.append(True)
            len(done)
            done.append(True)

    num_points = num_points_of(call)
    assert num_points >= 5
    for place in range(1, num_points):
        entered.clear(), done.clear()
        assert interrupted_at(place, call)[0]
        assert entered == done
        assert handler() is signal.default_int_handler


def test_a_second_ctrl_c_after_one_second_ends_a_hanging_block(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    with DeferInterrupts():
        ctrl_c()
        now[0] = 0.9
        ctrl_c()
        now[0] = 1.0
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert handler() is signal.default_int_handler


def test_another_handler_in_python_gets_it():
    """Such as the handler of asyncio, which cancels a task. One that is set inside stays."""
    seen = []
    with handled_by(lambda number, frame: seen.append(number)):
        mine = handler()
        with DeferInterrupts():
            ctrl_c()
            assert not seen
        assert seen == [signal.SIGINT]
        assert handler() is mine
        with DeferInterrupts():
            signal.signal(signal.SIGINT, partial(seen.append))
            mine = handler()
        assert handler() is mine


@pytest.mark.parametrize("kept", [signal.SIG_IGN, signal.SIG_DFL])
def test_without_a_python_handler_nothing_is_replaced(kept):
    with handled_by(kept), DeferInterrupts():
        assert handler() == kept


def test_other_threads_defer_nothing():
    """Other threads get no KeyboardInterrupt and cannot set handlers."""

    def work():
        with DeferInterrupts():
            return handler()

    assert in_threads(work) == [signal.default_int_handler]
