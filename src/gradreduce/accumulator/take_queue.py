"""Serves waiting takes in order, first come, first served, and computes what each returns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from gradreduce import ops
from gradreduce.arrays.distributed import Part
from gradreduce.device import (
    Buffer,
    DeferInterrupts,
    Device,
    DType,
    deadline_scope,
    fork_streams,
    join_streams,
)
from gradreduce.errors import CancelledError, DeadlineExceededError
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .dense_storage import allocate_flat
from .sparse_storage import take_sparse
from .state import AccumulatorState, PendingTake, locked

__all__ = [
    "await_take",
    "cancel_waiting",
    "close",
    "forget",
    "join",
    "serve_held",
    "serve_joint",
    "take_held",
    "withdraw",
]


# Mesh accumulators that travel together: devices, divisor, what reduces them.
_Batch = tuple[tuple[Device, ...], float, CrossDeviceOps]


def take_held(states: Sequence[AccumulatorState]) -> list[tuple[Part, ...]]:
    """Takes the gradient of each state, all locks held; then its count is 0, its step one on.

    What is reduced or divided in place is no sum any more: if anything fails between that and the
    count, the devices are lost.

    Returns:
        For each state its gradient on each of its devices; empty for one that holds none.
    """
    for state in states:  # a take without a launch must notice too
        state.check_devices()
    taken: dict[AccumulatorState, tuple[Part, ...]] = {}
    held = [state for state in states if state.count]
    dense = [state for state in held if not state.sparse]
    alone = {state: _room(state) for state in dense if not state.over_mesh}
    if len(dense) < len(held):  # first, because it writes no sum
        sparse = [state for state in held if state.sparse]
        taken.update(zip(sparse, take_sparse(sparse), strict=True))
    batches: dict[_Batch, list[AccumulatorState]] = {}
    for state in dense:
        if state.over_mesh:
            key = (state.devices, _divisor(state), state.cross_device_ops)
            batches.setdefault(key, []).append(state)
    with ExitStack() as guard:
        for index, ((_, divisor, reducer), together) in enumerate(batches.items(), 1):
            # A batch asks for its memory before its first launch; but a later one may get none, and
            # then the sums of those before it must be there still. So must those of all batches
            # where sums are divided on one device afterwards.
            last = index == len(batches) and not alone
            reduced = reducer.reduce_buffers(
                _partials(together),
                divisor=divisor,
                out_dtypes=[state.dtype for state in together],
                consume=guard if last else None,
            )
            taken.update(zip(together, reduced, strict=True))
        for state, (_, out) in alone.items():
            taken[state] = (out,)
        _divide(alone, guard)
        for state in states:
            state.reset()
    return [taken.get(state, ()) for state in states]


def _divisor(state: AccumulatorState) -> float:
    return float(state.count if state.reduction_type == "MEAN" else 1)


def _partials(states: Sequence[AccumulatorState]) -> list[list[Buffer]]:
    """The partial sum of each device; zeros where nothing came, the one place that zeroes.

    The zeros of a device lie together, as sums do that came together: so what is packed, and in
    which order, is a matter of the accumulators and not of who has brought something.
    """
    zeros: dict[tuple[AccumulatorState, int], Buffer] = {}
    for index, device in enumerate(states[0].devices):
        empty: dict[DType, list[AccumulatorState]] = {}
        for state in states:
            if state.totals[index] is None:
                empty.setdefault(state.dtype, []).append(state)
        for dtype, found in empty.items():
            made = allocate_flat(device.zeros, dtype, [state.sum_shape or () for state in found])
            zeros.update(zip([(state, index) for state in found], made, strict=True))
    return [
        [
            total if isinstance(total, Buffer) else zeros[state, index]
            for index, total in enumerate(state.totals)
        ]
        for state in states
    ]


def _room(state: AccumulatorState) -> tuple[Buffer, Buffer]:
    """The sum on the one device and where its result goes: the sum itself if of its type."""
    (total,) = state.totals
    assert isinstance(total, Buffer), "it holds gradients"
    same = total.dtype == state.dtype
    return total, total if same else total.device.empty(total.shape, state.dtype)


def _divide(alone: dict[AccumulatorState, tuple[Buffer, Buffer]], guard: ExitStack) -> None:
    """``out = total / divisor`` for each sum.

    Co-located devices share a launch. Sums that go elsewhere come first.

    Args:
        alone: for each state the sum, and where its result goes.
        guard: gets what loses the devices of sums that are divided in place, if anything fails.
    """
    apart: list[tuple[float, Buffer, Buffer]] = []
    in_place: list[tuple[float, Buffer, Buffer]] = []
    for state, (total, out) in alone.items():
        divisor = _divisor(state)
        if out is not total:
            apart.append((divisor, total, out))
        elif divisor != 1:
            in_place.append((divisor, total, out))
    if apart:
        _launch(apart)
    if in_place:
        kept = [total.device for _, total, _ in in_place]
        guard.enter_context(kept[0].mesh_state.fail_on_partial_write(kept))
        _launch(in_place)


def _launch(divisions: list[tuple[float, Buffer, Buffer]]) -> None:
    """One launch for each physical device, divisor and dtype."""
    launches: dict[tuple[int, float], list[tuple[Buffer, Buffer]]] = {}
    for divisor, total, out in divisions:
        launches.setdefault((total.device.physical, divisor), []).append((total, out))
    for (_, divisor), pairs in launches.items():
        devices = [total.device for total, _ in pairs]
        join_streams(devices[0], devices)
        ops.all_sum(
            [[out] for _, out in pairs],
            [[total] for total, _ in pairs],
            divisor=divisor,
            device=devices[0],
        )
        fork_streams(devices[0], devices)


_log = logging.getLogger(__name__)


def join(pending_take: PendingTake) -> None:
    """Puts a take into the queues, and serves it if it can be served at once.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: its mesh was closed, is from before a fork, or lost a device.
        CollectiveError: its mesh is dead.
    """
    if pending_take.deadline is not None:
        pending_take.states[0].devices[0].mesh_state.guard()  # whoever serves it starts no thread
    with locked(pending_take.states):
        for state in pending_take.states:
            state.check_open()
            state.check_devices()  # nobody could ever serve it
        for state in pending_take.states:
            state.queue.append(pending_take)
        joint = serve_held(pending_take.states)
    serve_joint(joint)


def await_take(pending_take: PendingTake, timeout: float | None) -> None:
    """Blocks until the ticket was served, cancelled, or its time ran out.

    Args:
        pending_take: from ``join``.
        timeout: seconds, from ``as_timeout``; None for ever.

    Raises:
        DeadlineExceededError: not served in time; it has left every queue and taken nothing.
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
    """Takes an unserved ticket out of every queue; what waited behind it is looked at.

    When its time ran out, and when whoever would wait for it has raised: it must not take then.
    """
    with DeferInterrupts():
        with locked(pending_take.states):
            if pending_take.done.is_set():
                return
            pending_take.error = DeadlineExceededError(_missing(pending_take, timeout))
            pending_take.leave()
            joint = serve_held(pending_take.states)
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
        state.reset()
        state.step = step
    if lost:  # a handler may do anything: no lock is held
        _log.warning("an accumulator at step %d lost %d gradients with its mesh", step, lost)


def cancel_waiting(state: AccumulatorState) -> None:
    """Cancels the takes that wait for an accumulator; its mesh was closed or died, or it itself."""
    with state.lock:
        waiting = list(state.queue)
    for pending_take in waiting:
        with locked(pending_take.states):
            if not pending_take.done.is_set():
                pending_take.error = CancelledError(_cancelled(state))
                pending_take.leave()
    for other in dict.fromkeys(each for pending_take in waiting for each in pending_take.states):
        with locked([other]):
            joint = serve_held([other])
        serve_joint(joint)


def serve_held(states: Sequence[AccumulatorState]) -> list[PendingTake]:
    """Serves every take that these states satisfy, while the caller holds their locks.

    Returns:
        Joint takes at the head of a queue that need locks which the caller does not hold.
    """
    joint: list[PendingTake] = []
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


def serve_joint(pending_takes: Sequence[PendingTake]) -> None:
    """Serves joint takes; the caller holds no lock."""
    waiting = list(pending_takes)
    while waiting:
        pending_take = waiting.pop()
        with locked(pending_take.states):
            if pending_take.done.is_set() or not pending_take.is_ready():
                continue
            _serve(pending_take)
            waiting += serve_held(pending_take.states)


def _serve(pending_take: PendingTake) -> None:
    """Launches the take, then counts; a failure goes to the taker and leaves the sums alone."""
    kinds = [state.kind for state in pending_take.states]
    devices = (device for state in pending_take.states for device in state.devices)
    try:
        with DeferInterrupts(), deadline_scope("take_grad", pending_take.deadline, devices):
            pending_take.taken = take_held(pending_take.states)
    except Exception as error:
        pending_take.error = error
    else:
        pending_take.kinds = kinds
    pending_take.leave()


def _cancelled(state: AccumulatorState) -> str:
    """TensorFlow's words, and why where it is not the caller's doing."""
    reason = state.devices[0].mesh_state.reason
    text = "TakeGrad operation was cancelled"
    return text if reason is None else f"{text}: the mesh is dead: {reason}"


def _missing(pending_take: PendingTake, timeout: float | None) -> str:
    """What is waited for: of several accumulators, those that lack gradients, five at most."""
    several = len(pending_take.states) > 1
    parts = [
        (f"accumulators[{index}] at " if several else "")
        + f"step {state.step}: {state.count} of {pending_take.num_required} gradients, "
        f"{max(0, pending_take.num_required - state.count)} missing, "
        f"{state.num_dropped} dropped as stale"
        + ("" if state.queue and state.queue[0] is pending_take else ", behind another take")
        for index, state in enumerate(pending_take.states)
        if not several
        or state.count < pending_take.num_required
        or not (state.queue and state.queue[0] is pending_take)
    ]
    rest = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    return f"no gradient within {timeout} s; {'; '.join(parts[:5])}{rest}"
