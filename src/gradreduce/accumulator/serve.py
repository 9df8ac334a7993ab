"""How waiting takes are served: first come, first served, by the call that satisfies them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gradreduce.device import DeferInterrupts, due
from gradreduce.errors import CancelledError, DeadlineExceededError

from .state import AccumulatorState, Ticket, locked
from .take import take_held

__all__ = [
    "await_ticket",
    "cancel_waiting",
    "close",
    "forget",
    "join",
    "serve_held",
    "serve_joint",
    "withdraw",
]

_log = logging.getLogger(__name__)


def join(ticket: Ticket) -> None:
    """Puts a take into the queues, and serves it if it can be served at once.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: its mesh was closed, is from before a fork, or lost a device.
        CollectiveError: its mesh is dead.
    """
    if ticket.deadline is not None:
        ticket.states[0].devices[0].fabric.guard()  # whoever serves it starts no thread
    with locked(ticket.states):
        for state in ticket.states:
            state.check_open()
            state.check_devices()  # nobody could ever serve it
        for state in ticket.states:
            state.queue.append(ticket)
        joint = serve_held(ticket.states)
    serve_joint(joint)


def await_ticket(ticket: Ticket, timeout: float | None) -> None:
    """Blocks until the ticket was served, cancelled, or its time ran out.

    Args:
        ticket: from ``join``.
        timeout: seconds, from ``as_timeout``; None for ever.

    Raises:
        DeadlineExceededError: not served in time; it has left every queue and taken nothing.
    """
    if not ticket.done.wait(timeout):
        withdraw(ticket, timeout)
    error, ticket.error = ticket.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # else its traceback, which holds this frame, would keep the sums alive


def withdraw(ticket: Ticket, timeout: float | None = None) -> None:
    """Takes an unserved ticket out of every queue; what waited behind it is looked at.

    When its time ran out, and when whoever would wait for it has raised: it must not take then.
    """
    with DeferInterrupts():
        with locked(ticket.states):
            if ticket.done.is_set():
                return
            ticket.error = DeadlineExceededError(_missing(ticket, timeout))
            ticket.leave()
            joint = serve_held(ticket.states)
        serve_joint(joint)


def close(state: AccumulatorState) -> None:
    """Closes an accumulator and frees its sum; takes that wait for it are cancelled.

    Joint ones leave all their queues, and what waited behind them there is looked at.
    """
    with state.lock:
        state.closed = True
        state.totals = [None] * len(state.devices)
    cancel_waiting(state)


def forget(state: AccumulatorState) -> None:
    """Drops what a mesh that died had added up: it may be half written, and nobody can tell.

    The step stays, so that what arrives for it afterwards counts.
    """
    with state.lock:
        lost = state.count
        step = state.step
        state.emptied()
        state.step = step
    if lost:  # a handler may do anything: no lock is held
        _log.warning("an accumulator at step %d lost %d gradients with its mesh", step, lost)


def cancel_waiting(state: AccumulatorState) -> None:
    """Cancels the takes that wait for an accumulator; its mesh was closed or died, or it itself."""
    with state.lock:
        waiting = list(state.queue)
    for ticket in waiting:
        with locked(ticket.states):
            if not ticket.done.is_set():
                ticket.error = CancelledError(_cancelled(state))
                ticket.leave()
    for other in dict.fromkeys(each for ticket in waiting for each in ticket.states):
        with locked([other]):
            joint = serve_held([other])
        serve_joint(joint)


def serve_held(states: Sequence[AccumulatorState]) -> list[Ticket]:
    """Serves every take that these states satisfy, while the caller holds their locks.

    Returns:
        Joint takes at the head of a queue that need locks which the caller does not hold.
    """
    joint: list[Ticket] = []
    progress = any([state.queue for state in states])  # mostly nobody waits
    held = set(states) if progress else set()
    while progress:
        progress = False
        for state in dict.fromkeys(states):
            head = state.queue[0] if state.queue else None
            if head is None or state.count < head.num_required:
                continue
            if not held.issuperset(head.states):
                if head not in joint:
                    joint.append(head)
            elif head.is_ready():
                _serve(head)
                progress = True
    return joint


def serve_joint(tickets: Sequence[Ticket]) -> None:
    """Serves joint takes; the caller holds no lock."""
    waiting = list(tickets)
    while waiting:
        ticket = waiting.pop()
        with locked(ticket.states):
            if ticket.done.is_set() or not ticket.is_ready():
                continue
            _serve(ticket)
            waiting += serve_held(ticket.states)


def _serve(ticket: Ticket) -> None:
    """Launches the take, then counts; a failure goes to the taker and leaves the sums alone."""
    kinds = [state.kind for state in ticket.states]
    devices = (device for state in ticket.states for device in state.devices)
    try:
        with DeferInterrupts(), due("take_grad", ticket.deadline, devices):
            ticket.taken = take_held(ticket.states)
    except Exception as error:
        ticket.error = error
    else:
        ticket.kinds = kinds
    ticket.leave()


def _cancelled(state: AccumulatorState) -> str:
    """TensorFlow's words, and why where it is not the caller's doing."""
    reason = state.devices[0].fabric.reason
    text = "TakeGrad operation was cancelled"
    return text if reason is None else f"{text}: the mesh is dead: {reason}"


def _missing(ticket: Ticket, timeout: float | None) -> str:
    """What is waited for: of several accumulators, those that lack gradients, five at most."""
    several = len(ticket.states) > 1
    parts = [
        (f"accumulators[{place}] at " if several else "")
        + f"step {state.step}: {state.count} of {ticket.num_required} gradients, "
        f"{max(0, ticket.num_required - state.count)} missing, {state.num_dropped} dropped as stale"
        + ("" if state.queue and state.queue[0] is ticket else ", behind another take")
        for place, state in enumerate(ticket.states)
        if not several
        or state.count < ticket.num_required
        or not (state.queue and state.queue[0] is ticket)
    ]
    rest = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    return f"no gradient within {timeout} s; {'; '.join(parts[:5])}{rest}"
