"""The queue of waiting takes: completes them in order and computes their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from operator import attrgetter
from typing import TypeVar

from gradreduce.arrays.distributed import Part
from gradreduce.device import DeferInterrupts, deadline_scope, group_by
from gradreduce.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    listed,
    log_warning,
)

from .state import AccumulatorState, PendingTake, Taken, hold_locks

T = TypeVar("T")
LOG_SECONDS = 60.0  # after so long a take that waits logs what it waits for


def take_locked(
    states: Sequence[AccumulatorState],
    reduce: Callable[[Sequence[AccumulatorState], ExitStack], T],
) -> T:
    """Reduces the sums of all states and resets the states; all locks must be held.

    Args:
        states: the states; each must be usable.
        reduce: called with the states that have gradients, and a guard like that of
            ``Storage.take``; returns the result of this function.
    """
    for state in states:
        state.check_devices()  # a take without a launch must check too
        state.check_step()
        if state.excess and not state.weight():
            raise InvalidArgumentError(
                f"all gradients in the accumulator {state.name!r} have weight 0: at least one must "
                "have another weight"
            )
    with ExitStack() as guard:
        reduced = reduce([state for state in states if state.count], guard)
        for state in states:
            state.reset(state.step + 1)
    return reduced


def take_sums(
    states: Sequence[AccumulatorState], guard: ExitStack
) -> dict[AccumulatorState, Taken]:
    """Returns the gradient of each state, which has one; see ``Storage.take``.

    Sums may be reduced or divided in place. If anything fails between this and the reset, the
    devices of these sums are marked as failed.
    """
    by_storage = group_by([(state.storage, state) for state in states])
    taken: dict[AccumulatorState, tuple[Part, ...]] = {}
    for storage in sorted(by_storage, key=attrgetter("overwrites")):
        taken |= storage.take(by_storage[storage], guard)
    return {state: (parts, state.kind) for state, parts in taken.items()}


def join(pending_take: PendingTake) -> None:
    """Appends a take to the queues, and completes it if it is ready.

    Raises:
        InvalidArgumentError: an accumulator is at the last step.
        CancelledError: an accumulator was closed.
    """
    if pending_take.deadline is not None:
        pending_take.states[0].mesh_state.guard()  # starts the watchdog before a lock is held
    with hold_locks(pending_take.states):
        for state in pending_take.states:
            state.check_open()
        for state in pending_take.states:
            state.queue.append(pending_take)
        complete_ready(pending_take.states, held=True)
        if not pending_take.done.is_set():
            for state in pending_take.states:
                state.check_devices()  # no gradient can arrive on a failed device
                state.check_step()
    complete_ready(pending_take.states)


def await_take(pending_take: PendingTake, timeout: float | None) -> None:
    """Blocks until the take completes or is cancelled, or the timeout expires.

    Logs a warning after ``LOG_SECONDS``, once.

    Args:
        pending_take: from ``join``.
        timeout: seconds, from ``as_timeout``; None without limit.

    Raises:
        DeadlineExceededError: the timeout expired; the take has left all queues.
    """
    first = LOG_SECONDS if timeout is None else min(timeout, LOG_SECONDS)
    if not pending_take.done.wait(first):
        if first != timeout:
            _log_wait(pending_take)
            pending_take.done.wait(None if timeout is None else timeout - first)
        withdraw(pending_take, timeout)
    error, pending_take.error = pending_take.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and so would keep the sums alive


def withdraw(pending_take: PendingTake, timeout: float | None = None) -> None:
    """Removes a take from all queues if it is incomplete, after a timeout or an error.

    Later takes complete if they are now ready.
    """
    with DeferInterrupts():
        _cancel(
            [pending_take],
            lambda: DeadlineExceededError(
                f"not enough gradients within {timeout} s; {_waits_for(pending_take)}"
            ),
        )


def close(state: AccumulatorState) -> None:
    """Closes an accumulator, frees its sum, and cancels waiting takes.

    A take that waits for several accumulators leaves all their queues. Later takes complete if they
    are now ready.
    """
    with state.lock:
        state.closed = True
        state.totals = [None] * len(state.devices)
    cancel_waiting(state)


def discard_sums(state: AccumulatorState) -> None:
    """Discards partial sums after a mesh failure, because they may be half written.

    The step is unchanged, so that later gradients of this step are added.
    """
    with state.lock:
        num_discarded, step = state.count, state.step
        state.reset(step)
    if num_discarded:  # no lock is held, because a log handler may use accumulators
        log_warning(
            __name__,
            "accumulator %r at step %d discarded %d gradients: its mesh failed",
            state.name,
            step,
            num_discarded,
        )


def cancel_waiting(state: AccumulatorState) -> None:
    """Cancels waiting takes, because the accumulator or its mesh was closed or failed."""
    with state.lock:
        waiting = list(state.queue)
    reason = state.mesh_state.reason
    why = "" if reason is None else f": the mesh has failed: {reason}"
    _cancel(waiting, lambda: CancelledError(f"TakeGrad operation was cancelled{why}"))


def _cancel(pending_takes: Sequence[PendingTake], make_error: Callable[[], Exception]) -> None:
    """Removes incomplete takes from all queues, so that their calls raise the error.

    Later takes complete if they are now ready.
    """
    for pending_take in pending_takes:
        with hold_locks(pending_take.states):
            if not pending_take.done.is_set():
                pending_take.error = make_error()
                pending_take.leave()
    complete_ready([state for pending_take in pending_takes for state in pending_take.states])


_QUEUE = attrgetter("queue")


def complete_ready(states: Sequence[AccumulatorState], *, held: bool = False) -> None:
    """Completes the takes that are ready.

    A call that adds gradients calls this function twice. The first time it holds all locks, so that
    no other thread adds gradients before a waiting take completes. The second time it holds none,
    because a waiting take may also need the locks of other states.

    Args:
        states: the accumulators whose first take may be ready.
        held: True if the caller holds the locks of all ``states``; takes that also need other
            states are skipped. False if it holds no lock.
    """
    waiting = list(filter(_QUEUE, states))  # usually empty
    while waiting:
        state = waiting.pop()
        if not state.queue:
            continue
        with state.lock:
            head = state.first_take()
        if head is None or (held and not set(states).issuperset(head.states)):
            continue
        with nullcontext() if held else hold_locks(head.states):
            if head.is_ready():
                _complete(head)
                waiting += head.states


def _complete(pending_take: PendingTake) -> None:
    """Completes a take. On error, the waiting call raises it and the sums are unchanged."""
    devices = (device for state in pending_take.states for device in state.devices)
    try:
        with DeferInterrupts(), deadline_scope("take_grad", pending_take.deadline, devices):
            pending_take.taken = take_locked(pending_take.states, take_sums)
    except Exception as error:
        pending_take.error = error
    pending_take.leave()


def _log_wait(pending_take: PendingTake) -> None:
    """Logs what a take waits for, and which threads have added gradients."""
    states = pending_take.states
    with hold_locks(states):
        if pending_take.done.is_set():
            return
        waits_for = _waits_for(pending_take, _sources_of)
    log_warning(  # no lock is held, because a log handler may use accumulators
        __name__,
        "a take of %s has waited for %g s: %s",
        listed(repr(state.name) for state in states),
        LOG_SECONDS,
        waits_for,
    )


def _sources_of(state: AccumulatorState) -> str:
    """Returns which threads have added the gradients, as part of a message."""
    came = listed(f"{thread} ({count})" for thread, count in state.sources.items())
    return f", from the threads {came}" if came else ""


def missing(state: AccumulatorState, num_required: int) -> str:
    """Returns how many gradients a take has and needs, as part of a message."""
    return (
        f"step {state.step}: {state.count} of {num_required} gradients, "
        f"{max(0, num_required - state.count)} missing, {state.num_dropped} dropped as stale"
    )


def _waits_for(
    pending_take: PendingTake, details: Callable[[AccumulatorState], str] = lambda state: ""
) -> str:
    """Returns at most five accumulators that lack gradients, as part of a message.

    Args:
        pending_take: the take; all locks are held.
        details: returns what else to say of an accumulator.
    """
    several, required = len(pending_take.states) > 1, pending_take.num_required
    parts = []
    for index, state in enumerate(pending_take.states):
        is_first = state.first_take() is pending_take
        if several and is_first and state.count >= required:
            continue
        parts.append(
            (f"accumulators[{index}] at " if several else "")
            + missing(state, required)
            + details(state)
            + ("" if is_first else ", behind another take")
        )
    return "; ".join(parts[:5]) + (f"; and {len(parts) - 5} more" if len(parts) > 5 else "")
