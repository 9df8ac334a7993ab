"""How waiting takes are served: first come, first served, by the call that satisfies them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from gradreduce import ops
from gradreduce.cross_device import AllReduceCrossDeviceOps
from gradreduce.device import Buffer, Device, DType, accumulate_dtype
from gradreduce.errors import DeadlineExceededError

from .state import AccumulatorState, Ticket, locked

__all__ = ["join", "serve_held", "serve_joint", "take_held"]


def join(ticket: Ticket) -> None:
    """Puts a take into the queues, and serves it if it can be served at once.

    Raises:
        CancelledError: an accumulator was closed.
    """
    with locked(ticket.states):
        for state in ticket.states:
            state.check_open()
        for state in ticket.states:
            state.queue.append(ticket)
        joint = serve_held(ticket.states)
    serve_joint(joint)


def await_ticket(ticket: Ticket, timeout: float | None) -> None:
    """Blocks until the ticket was served, cancelled, or its time ran out.

    Raises:
        DeadlineExceededError: not served within ``timeout`` seconds; it has left every queue and
            taken nothing.
    """
    limit = None if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
    if not ticket.done.wait(limit):
        with locked(ticket.states):
            if not ticket.done.is_set():
                ticket.error = DeadlineExceededError(_missing(ticket, timeout))
                ticket.leave()
            joint = serve_held(ticket.states)  # the next head may have been waiting behind it
        serve_joint(joint)
    if ticket.error is not None:
        raise ticket.error


def serve_held(states: Sequence[AccumulatorState]) -> list[Ticket]:
    """Serves every take that these states satisfy, while the caller holds their locks.

    Returns:
        Joint takes at the head of a queue that need locks which the caller does not hold.
    """
    held = set(states)
    joint: list[Ticket] = []
    progress = True
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
    try:
        ticket.taken = take_held(ticket.states)
    except Exception as error:
        ticket.error = error
    else:
        ticket.kinds = kinds
    ticket.leave()


def take_held(states: Sequence[AccumulatorState]) -> list[tuple[Buffer, ...]]:
    """Takes the gradient of each state, all locks held; then its count is 0, its step one on.

    Returns:
        For each state its gradient on each of its devices; empty for one that holds none.
    """
    results: list[tuple[Buffer, ...]] = [()] * len(states)
    batches: dict[tuple[bool, tuple[Device, ...], float, AllReduceCrossDeviceOps], list[int]] = {}
    for place, state in enumerate(states):
        if state.count:
            divisor = float(state.count if state.reduction_type == "MEAN" else 1)
            key = (state.over_mesh, state.devices, divisor, state.ops)
            batches.setdefault(key, []).append(place)
    for (over_mesh, _, divisor, reducer), places in batches.items():
        gradients = [_partials(states[place]) for place in places]
        dtypes = [states[place].dtype for place in places]
        if over_mesh:
            taken = reducer.reduce_buffers(
                gradients, divisor=divisor, out_dtypes=dtypes, consume=True
            )
        else:
            taken = _on_one_device([sums[0] for sums in gradients], dtypes, divisor)
        for place, buffers in zip(places, taken, strict=True):
            results[place] = buffers
    for state in states:
        state.emptied()
    return results


def _partials(state: AccumulatorState) -> list[Buffer]:
    """The partial sum of each device; zeros where nothing came, the one place that zeroes."""
    wide = accumulate_dtype(state.dtype)
    shape = state.sum_shape or ()
    return [
        device.zeros(shape, wide) if total is None else total
        for device, total in zip(state.devices, state.totals, strict=True)
    ]


def _on_one_device(
    totals: Sequence[Buffer], dtypes: Sequence[DType], divisor: float
) -> list[tuple[Buffer, ...]]:
    """The sums divided, in place where they have the result's type already."""
    outs = []
    for total, dtype in zip(totals, dtypes, strict=True):
        same = total.dtype == dtype
        outs.append(total if same else total.device.empty(total.shape, dtype))
    moved = [
        place
        for place, (out, total) in enumerate(zip(outs, totals, strict=True))
        if divisor != 1 or out is not total
    ]
    ops.all_sum([[outs[place]] for place in moved], [[totals[place]] for place in moved],
                divisor=divisor)  # fmt: skip
    return [(out,) for out in outs]


def _missing(ticket: Ticket, timeout: float | None) -> str:
    parts = [
        f"step {state.step}: {state.count} of {ticket.num_required} gradients, "
        f"{max(0, ticket.num_required - state.count)} missing, {state.num_dropped} dropped as stale"
        + ("" if state.queue[0] is ticket else ", behind another take")
        for state in ticket.states
    ]
    return f"no gradient within {timeout} s; " + "; ".join(parts)
