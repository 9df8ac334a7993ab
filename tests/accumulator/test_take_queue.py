"""Waiting takes: the order in which they complete, and how waiting ends."""

import logging
import re
import threading

import numpy as np
import pytest
from accumulator.kinds import counters

import gradreduce as gr
from gradreduce.accumulator import take_queue
from gradreduce.errors import CancelledError, DeadlineExceededError


class Feeder(logging.Handler):
    """Keeps messages; a message about a wait ends it by a gradient for each accumulator."""

    def __init__(self, *accumulators):
        super().__init__()
        self.accumulators, self.texts = accumulators, []

    def emit(self, record):
        self.texts.append(record.getMessage())
        for each in self.accumulators:
            each.apply_grad([2.0], local_step=each.global_step)


@pytest.fixture
def feed(monkeypatch):
    """Makes takes log at once; returns a function that answers with gradients."""
    assert take_queue.LOG_SECONDS == 60
    monkeypatch.setattr(take_queue, "LOG_SECONDS", 0.0)
    logger, added = logging.getLogger(take_queue.__name__), []

    def feed(*accumulators):
        added.append(Feeder(*accumulators))
        logger.addHandler(added[-1])
        return added[-1].texts

    yield feed
    for each in added:
        logger.removeHandler(each)


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_take_that_waits_for_a_minute_says_for_what(accumulator, call_threads, feed, timeout):
    acc = accumulator(name="grads")
    acc.set_global_step(3)
    acc.apply_grad([9.0], local_step=2)  # stale
    texts = feed(acc)
    assert acc.take_grad(1, timeout=timeout).tolist() == [2.0]
    begin, end = "a take of 'grads' has waited for 0 s: step", "1 missing, 1 dropped as stale"
    assert texts == [f"{begin} 3: 0 of 1 gradients, {end}"]
    for _ in range(2):
        acc.apply_grad([4.0], local_step=4)
    assert call_threads.start(acc.apply_grad, [8.0], 4).result()
    assert acc.take_grad(4, timeout=timeout).tolist() == [4.5]
    (thread,) = re.findall(r"\(2\), (.+) \(1\)", texts[1])
    assert texts[1:] == [
        f"{begin} 4: 3 of 4 gradients, {end}, from the threads "
        f"{threading.current_thread().name} (2), {thread} (1)"
    ]
    acc.apply_grad([4.0], local_step=5)
    acc.take_grad(1, timeout=timeout)  # does not wait
    with pytest.raises(DeadlineExceededError):
        acc.take_grad(1, timeout=0)
    assert len(texts) == 2


def test_a_take_of_several_accumulators_says_which_it_waits_for(accumulator, feed):
    full, empty = accumulator(name="full"), accumulator(name="empty")
    full.apply_grad([1.0])
    texts = feed(empty)
    assert [each.tolist() for each in gr.take_grads([full, empty], 1)] == [[1.0], [2.0]]
    assert texts == [
        "a take of 'full', 'empty' has waited for 0 s: accumulators[1] at step 0: 0 of 1 "
        "gradients, 1 missing, 0 dropped as stale"
    ]


# -- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, -np.inf, 0.001, np.float32(0)])
def test_the_error_has_the_step_the_count_and_the_missing_number(
    accumulator, call_threads, timeout
):
    acc = accumulator()
    acc.set_global_step(4)
    acc.apply_grad([1.0], 3)
    acc.apply_grad([1.0], 4)
    text = "step 4: 1 of 3 gradients, 2 missing, 1 dropped as stale"
    with pytest.raises(TimeoutError, match=f"^not enough gradients within .* s; {text}$") as late:
        acc.take_grad(3, timeout=timeout)
    assert type(late.value) is DeadlineExceededError
    assert counters(acc) == [(1, 4, 1)]
    head = call_threads.waiting(acc.take_grad, 2)
    with pytest.raises(TimeoutError, match="behind another take"):
        acc.take_grad(1, timeout=timeout)
    acc.apply_grad([3.0], 4)
    assert head.result().tolist() == [2.0]


@pytest.mark.parametrize("timeout", [np.inf, 1e300, 10**30, None])
def test_waiting_for_ever(accumulator, call_threads, timeout):
    """The apply that adds the last gradient completes the take."""
    acc = accumulator()
    take = call_threads.waiting(acc.take_grad, 2, timeout=timeout)
    acc.apply_grad([2.0])
    assert not take.is_done
    acc.apply_grad([4.0])
    assert take.is_done
    assert take.result().tolist() == [3.0]
    assert counters(acc) == [(0, 1, 0)]


@pytest.mark.parametrize(("timeout", "error"), [("1", TypeError), ([1], TypeError),
                                                (np.nan, ValueError)])  # fmt: skip
def test_a_wrong_timeout_leaves_nothing_in_the_queue(accumulator, timeout, error):
    acc = accumulator()
    with pytest.raises(error, match="timeout"):
        acc.take_grad(1, timeout=timeout)
    acc.apply_grad([2.0])
    assert acc.take_grad(1, timeout=0).tolist() == [2.0]


def test_a_take_that_completes_at_its_timeout_returns_its_gradient(accumulator, call_threads):
    acc = accumulator()
    take = call_threads.expiring(acc.take_grad, 1)
    acc.apply_grad([2.0])
    take.expire()
    assert take.result().tolist() == [2.0]


# -- several accumulators -------------------------------------------------------------------------


def test_a_timeout_leaves_all_queues_and_names_each(accumulator):
    first, second = accumulator(), accumulator()
    first.apply_grad([5.0])
    second.set_global_step(3)
    with pytest.raises(DeadlineExceededError) as caught:
        gr.take_grads([first, second], 1, timeout=0)
    assert "within 0.0 s; accumulators[1] at step 3: 0 of 1 gradients, 1 missi" in str(caught.value)
    assert not first.accumulator_ref.queue
    assert not second.accumulator_ref.queue
    assert counters(first, second) == [(1, 0, 0), (0, 3, 0)]
    assert first.take_grad(1, timeout=0).tolist() == [5.0]


def test_an_apply_during_a_close_completes_no_take(accumulator, call_threads, monkeypatch):
    """The accumulator is closed and its takes are not cancelled yet; they get nothing."""
    first, second = accumulator(), accumulator()
    first.apply_grad([1.0])
    joint = call_threads.waiting(gr.take_grads, [first, second], 1)
    hold_locks, kept = take_queue.hold_locks, []

    def late(states):
        if not kept:
            kept.append(None)
            kept.append(call_threads.start(second.apply_grad, [2.0]).result())
        return hold_locks(states)

    monkeypatch.setattr(take_queue, "hold_locks", late)
    first.close()
    assert kept == [None, True]
    with pytest.raises(CancelledError):
        joint.result()
    assert second.take_grad(1, timeout=0).tolist() == [2.0]
