"""Joint takes that wait: in every queue, completed when first in all of them."""

from __future__ import annotations

import threading

import pytest

import gradreduce as gr
from gradreduce.accumulator import take_now, take_queue
from gradreduce.errors import CancelledError, DeadlineExceededError


def counters(*accumulators):
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


def queues(*accumulators):
    return [len(acc.accumulator_ref.queue) for acc in accumulators]


@pytest.fixture
def several(accumulator):
    """Makes accumulators on one device."""
    return lambda count, **options: [accumulator(**options) for _ in range(count)]


# -- waiting --------------------------------------------------------------------------------------


def test_a_joint_take_needs_enough_in_each(several, call_threads):
    first, second = several(2)
    take = call_threads.waiting(gr.take_grads, [first, second], 2)
    gr.apply_grads([first, second], [[1.0], [2.0]])
    first.apply_grad([3.0])
    assert not take.is_done
    second.apply_grad([4.0])
    assert take.is_done
    assert [array.tolist() for array in take.result()] == [[2.0], [3.0]]
    assert counters(first, second) == [(0, 1, 0), (0, 1, 0)]
    assert queues(first, second) == [0, 0]


def test_a_joint_take_waits_until_it_is_first_in_every_queue(several, call_threads):
    first, second = several(2)
    before = call_threads.waiting(second.take_grad, 2)
    joint = call_threads.waiting(gr.take_grads, [first, second], 1)
    behind = call_threads.waiting(first.take_grad, 1)
    gr.apply_grads([first, second], [[1.0], [1.0]])
    assert not joint.is_done
    assert not behind.is_done
    second.apply_grad([3.0])
    assert before.is_done
    assert not joint.is_done, "what it needs of the second was just taken"
    second.apply_grad([7.0], 1)
    assert [array.tolist() for array in joint.result()] == [[1.0], [7.0]]
    assert not behind.is_done
    first.apply_grad([9.0], 1)
    assert before.result().tolist() == [2.0]
    assert behind.result().tolist() == [9.0]


def test_a_timeout_of_the_take_in_front_completes_the_joint_take(several, call_threads):
    first, second = several(2)
    gr.apply_grads([first, second], [[1.0], [2.0]])
    before = call_threads.expiring(second.take_grad, 2)
    joint = call_threads.waiting(gr.take_grads, [first, second], 1)
    assert not joint.is_done
    before.expire()
    with pytest.raises(DeadlineExceededError):
        before.result()
    assert joint.is_done
    assert [array.tolist() for array in joint.result()] == [[1.0], [2.0]]


def test_a_timeout_leaves_all_queues_and_names_each(several):
    first, second = several(2)
    first.apply_grad([5.0])
    second.set_global_step(3)
    with pytest.raises(DeadlineExceededError) as caught:
        gr.take_grads([first, second], 1, timeout=0)
    assert "within 0.0 s; accumulators[1] at step 3: 0 of 1 gradients, 1 missi" in str(caught.value)
    assert queues(first, second) == [0, 0]
    assert counters(first, second) == [(1, 0, 0), (0, 3, 0)]
    assert first.take_grad(1, timeout=0).tolist() == [5.0]


def test_when_a_joint_take_times_out_the_next_of_every_queue_is_completed(several, call_threads):
    first, second, third = several(3)
    gr.apply_grads([first, third], [[1.0], [3.0]])
    joint = call_threads.expiring(gr.take_grads, [first, second, third], 1)
    behind = [call_threads.waiting(acc.take_grad, 1) for acc in (first, second, third)]
    assert [take.is_done for take in behind] == [False] * 3
    joint.expire()
    with pytest.raises(DeadlineExceededError):
        joint.result()
    assert behind[0].result().tolist() == [1.0]
    assert behind[2].result().tolist() == [3.0]
    assert not behind[1].is_done
    second.apply_grad([2.0])
    assert behind[1].result().tolist() == [2.0]


def test_closing_one_cancels_the_joint_take_and_unblocks_the_other_queues(several, call_threads):
    first, second, third = several(3)
    gr.apply_grads([second, third], [[2.0], [3.0]])
    joint = call_threads.waiting(gr.take_grads, [first, second], 1)
    behind = call_threads.waiting(second.take_grad, 1)
    joint_behind = call_threads.waiting(gr.take_grads, [third, second], 1)
    first.close()
    with pytest.raises(CancelledError):
        joint.result()
    assert behind.is_done
    assert behind.result().tolist() == [2.0]
    assert not joint_behind.is_done
    second.apply_grad([8.0], 1)
    assert [array.tolist() for array in joint_behind.result()] == [[3.0], [8.0]]
    for call in (
        lambda: gr.apply_grads([first, second], [[1.0], [1.0]], 5),
        lambda: gr.take_grads([second, first], 1),
    ):
        with pytest.raises(CancelledError):
            call()
    assert counters(second) == [(0, 2, 0)]
    assert queues(second, third) == [0, 0]


def test_an_apply_during_a_close_completes_no_take(several, call_threads, monkeypatch):
    """The accumulator is closed and its takes are not cancelled yet; they get nothing."""
    first, second = several(2)
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


def test_opposite_orders_never_deadlock(several, call_threads):
    """take_grads([A, B]) against take_grads([B, A]), both against applies in both orders."""
    rounds = 150
    first, second = several(2, reduction_type="SUM")
    start = threading.Barrier(4)

    def take(accumulators):
        start.wait(30)
        return [
            [float(array[0]) for array in gr.take_grads(accumulators, 1)] for _ in range(rounds)
        ]

    def apply(accumulators, grads):
        start.wait(30)
        return sum(gr.apply_grads(accumulators, grads, 10**9) for _ in range(rounds))

    takes = [call_threads.start(take, order) for order in ([first, second], [second, first])]
    applies = [
        call_threads.start(apply, [first, second], [[1.0], [2.0]]),
        call_threads.start(apply, [second, first], [[2.0], [1.0]]),
    ]
    assert [call.result() for call in applies] == [rounds, rounds]
    # As many takes as applies, so the last takes may lack gradients: add some.
    while call_threads.any_running(takes):
        gr.apply_grads([first, second], [[1.0], [2.0]], 10**9)
    for call, (left, right) in zip(takes, ((1, 2), (2, 1)), strict=True):
        results = call.result()
        assert len(results) == rounds
        assert all(pair[0] * right == pair[1] * left > 0 for pair in results)


def test_a_ring_of_joint_takes_never_deadlocks(several, call_threads):
    rounds = 60
    ring = several(3)
    start = threading.Barrier(4)

    def take(accumulators):
        start.wait(30)
        for _ in range(rounds):
            gr.take_grads(accumulators, 1)

    takes = [call_threads.start(take, [ring[place], ring[(place + 1) % 3]]) for place in range(3)]
    start.wait(30)
    while call_threads.any_running(takes):
        gr.apply_grads(ring, [[1.0]] * 3, 10**9)
    for call in takes:
        call.result()
    assert [step for _, step, _ in counters(*ring)] == [2 * rounds] * 3


# -- take_now: what the training step uses --------------------------------------------------------


def test_take_now_never_blocks_and_moves_every_step(several, call_threads):
    first, second = several(2)
    assert take_now([first, second], 1) is None
    first.apply_grad([1.0])
    first.apply_grad([3.0])
    assert take_now([first, second], 3) is None
    waiting = call_threads.waiting(second.take_grad, 1)
    assert take_now([first, second], 2) is None, "another take waits"
    assert counters(first, second) == [(2, 0, 0), (0, 0, 0)]
    second.apply_grad([7.0])
    assert waiting.result().tolist() == [7.0]
    taken, nothing = take_now([first, second], 2)
    assert taken.tolist() == [2.0]
    assert nothing is None
    assert counters(first, second) == [(0, 1, 0), (0, 2, 0)]
    second.close()
    with pytest.raises(CancelledError):
        take_now([first, second], 1)
