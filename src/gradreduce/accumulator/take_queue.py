"""The queue of waiting takes: completes them in order and computes their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from operator import attrgetter

from gradreduce.arrays.distributed import Part
from gradreduce.device import DeferInterrupts, deadline_scope
from gradreduce.errors import CancelledError, DeadlineExceededError, log_warning

from .state import AccumulatorState, PendingTake, Storage, Taken, locked


def take_locked(states: Sequence[AccumulatorState]) -> list[Taken]:
    """Takes the gradient of each state and resets it; all locks must be held.

    Sums may be reduced or divided in place: if anything fails between that and the reset, their
    devices are marked as failed.

    Returns:
        For each state its gradient on each of its devices, empty without gradients; and the array
        type to return.
    """
    taken: dict[AccumulatorState, tuple[Part, ...]] = {}
    by_storage: dict[Storage, list[AccumulatorState]] = {}
    for state in states:
        state.check_devices()  # a take without a launch must check too
        if state.count:
            by_storage.setdefault(state.storage, []).append(state)
    with ExitStack() as guard:
        for storage in sorted(by_storage, key=attrgetter("overwrites")):
            taken |= storage.take(by_storage[storage], guard)
        for state in states:
            state.reset(state.step + 1)
    return [(taken.get(state, ()), state.kind) for state in states]


def join(pending_take: PendingTake) -> None:
    """Appends a take to the queues, and completes it if it is ready.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: its mesh was closed or inherited by a fork, or a device failed.
        CollectiveError: its mesh has failed.
    """
    if pending_take.deadline is not None:
        pending_take.states[0].mesh_state.guard()  # starts the watchdog before a lock is held
    with locked(pending_take.states):
        for state in pending_take.states:
            state.check_open()
            state.check_devices()  # else it would wait without end
        for state in pending_take.states:
            state.queue.append(pending_take)
        complete_ready(pending_take.states, held=True)
    complete_ready(pending_take.states)


def await_take(pending_take: PendingTake, timeout: float | None) -> None:
    """Blocks until the take completes or is cancelled, or the timeout expires.

    Args:
        pending_take: from ``join``.
        timeout: seconds, from ``as_timeout``; None without limit.

    Raises:
        DeadlineExceededError: the timeout expired; the take has left all queues.
    """
    if not pending_take.done.wait(timeout):
        withdraw(pending_take, timeout)
    error, pending_take.error = pending_take.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # else its traceback, which holds this frame, would keep the sums alive


def withdraw(pending_take: PendingTake, timeout: float | None = None) -> None:
    """Removes an incomplete take from all queues, after a timeout or an error.

    Takes behind it complete if they are ready.
    """
    with DeferInterrupts():
        _cancel([pending_take], lambda: DeadlineExceededError(_missing(pending_take, timeout)))


def close(state: AccumulatorState) -> None:
    """Closes an accumulator, frees its sum, and cancels waiting takes.

    Takes of several accumulators leave all their queues; takes behind them complete if ready.
    """
    with state.lock:
        state.closed = True
        state.totals = [None] * len(state.devices)
    cancel_waiting(state)


def discard_sums(state: AccumulatorState) -> None:
    """Discards partial sums after a mesh failure, because they may be half written.

    The step stays, so that later gradients of this step are added.
    """
    with state.lock:
        num_discarded, step = state.count, state.step
        state.reset(step)
    if num_discarded:  # a handler may do anything: no lock is held
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
    text = "TakeGrad operation was cancelled"
    text += "" if reason is None else f": the mesh has failed: {reason}"
    _cancel(waiting, lambda: CancelledError(text))


def _cancel(pending_takes: Sequence[PendingTake], make_error: Callable[[], Exception]) -> None:
    """Removes incomplete takes from all queues, so that their calls raise the error.

    Takes behind them complete if they are ready.
    """
    for each in pending_takes:
        with locked(each.states):
            if not each.done.is_set():
                each.error = make_error()
                each.leave()
    complete_ready([state for each in pending_takes for state in each.states])


def complete_ready(states: Sequence[AccumulatorState], *, held: bool = False) -> None:
    """Completes the takes that are ready.

    A call that adds gradients does so twice: with all locks held, so that a take that waits gets
    just the gradients that it requires; and without, because of takes that also need other states.

    Args:
        states: whose first takes may be ready.
        held: the caller holds their locks: takes that also need other states are left out. Else it
            holds no lock.
    """
    waiting = [state for state in states if state.queue]  # mostly nobody waits
    while waiting:
        state = waiting.pop()
        if not state.queue:
            continue
        with state.lock:
            head = state.queue[0] if state.queue else None
        if head is None or (held and not set(states).issuperset(head.states)):
            continue
        with nullcontext() if held else locked(head.states):
            if head.is_ready():
                _complete(head)
                waiting += head.states


def _complete(pending_take: PendingTake) -> None:
    """Completes a take; on error, the waiting call raises it and the sums stay."""
    devices = (device for state in pending_take.states for device in state.devices)
    try:
        with DeferInterrupts(), deadline_scope("take_grad", pending_take.deadline, devices):
            pending_take.taken = take_locked(pending_take.states)
    except Exception as error:
        pending_take.error = error
    pending_take.leave()


def missing(state: AccumulatorState, num_required: int) -> str:
    """Returns what a take still waits for, for a message."""
    return (
        f"step {state.step}: {state.count} of {num_required} gradients, "
        f"{max(0, num_required - state.count)} missing, {state.num_dropped} dropped as stale"
    )


def _missing(pending_take: PendingTake, timeout: float | None) -> str:
    """The message of a timeout: which accumulators lack gradients, at most five."""
    several, required = len(pending_take.states) > 1, pending_take.num_required
    parts = []
    for index, state in enumerate(pending_take.states):
        is_first = pending_take.is_first_of(state)
        if several and is_first and state.count >= required:
            continue
        parts.append(
            (f"accumulators[{index}] at " if several else "")
            + missing(state, required)
            + ("" if is_first else ", behind another take")
        )
    rest = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    return f"no gradient within {timeout} s; {'; '.join(parts[:5])}{rest}"
