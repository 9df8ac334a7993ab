"""The queue of waiting takes: completes them in order and computes their results."""

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

# Mesh accumulators that are reduced together: devices, divisor, cross_device_ops.
_Batch = tuple[tuple[Device, ...], float, CrossDeviceOps]


def take_locked(states: Sequence[AccumulatorState]) -> list[tuple[Part, ...]]:
    """Takes the gradient of each state and resets it; all locks must be held.

    Sums may be reduced or divided in place: if anything fails between that and the reset, their
    devices are marked as failed.

    Returns:
        For each state its gradient on each of its devices; empty without gradients.
    """
    for state in states:  # a take without a launch must check too
        state.check_devices()
    taken: dict[AccumulatorState, tuple[Part, ...]] = {}
    held = [state for state in states if state.count]
    dense = [state for state in held if not state.sparse]
    alone = {state: _sum_and_output(state) for state in dense if not state.over_mesh}
    if len(dense) < len(held):  # first, because it does not write the sums
        sparse = [state for state in held if state.sparse]
        taken.update(zip(sparse, take_sparse(sparse), strict=True))
    batches: dict[_Batch, list[AccumulatorState]] = {}
    for state in dense:
        if state.over_mesh:
            key = (state.devices, _divisor(state), state.cross_device_ops)
            batches.setdefault(key, []).append(state)
    with ExitStack() as guard:
        for index, ((_, divisor, reducer), together) in enumerate(batches.items(), 1):
            # A batch allocates its memory before its first launch; but a later batch may fail to,
            # and then the sums of those before it must be intact. So only the last one may
            # overwrite its sums, and only if no division follows.
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
    """The partial sums of each state; zeros for a device without gradients.

    The zeros of a device are allocated back to back, like sums that were added together: so the
    packing does not depend on which devices have gradients.
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


def _sum_and_output(state: AccumulatorState) -> tuple[Buffer, Buffer]:
    """The sum of a one-device state, and its output: the sum itself if dtypes agree."""
    (total,) = state.totals
    assert isinstance(total, Buffer), "it holds gradients"
    same = total.dtype == state.dtype
    return total, total if same else total.device.empty(total.shape, state.dtype)


def _divide(alone: dict[AccumulatorState, tuple[Buffer, Buffer]], guard: ExitStack) -> None:
    """Divides each sum; devices on one GPU share a launch.

    Sums with a separate output come first.

    Args:
        alone: for each state the sum and its output.
        guard: marks the devices of sums that are divided in place as failed on an error.
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
    """Divides with one launch for each GPU, divisor and dtype."""
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
    """Appends a take to the queues, and completes it if it is ready.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: its mesh was closed or inherited by a fork, or a device failed.
        CollectiveError: its mesh has failed.
    """
    if pending_take.deadline is not None:
        pending_take.states[0].devices[
            0
        ].mesh_state.guard()  # starts the watchdog here, before any lock is held
    with locked(pending_take.states):
        for state in pending_take.states:
            state.check_open()
            state.check_devices()  # else it would wait without end
        for state in pending_take.states:
            state.queue.append(pending_take)
        incomplete = complete_ready(pending_take.states)
    complete_multi(incomplete)


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
        with locked(pending_take.states):
            if pending_take.done.is_set():
                return
            pending_take.error = DeadlineExceededError(_missing(pending_take, timeout))
            pending_take.leave()
            incomplete = complete_ready(pending_take.states)
        complete_multi(incomplete)


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
        num_discarded = state.count
        step = state.step
        state.reset()
        state.step = step
    if num_discarded:  # a handler may do anything: no lock is held
        _log.warning(
            "accumulator %r at step %d discarded %d gradients: its mesh failed",
            state.name,
            step,
            num_discarded,
        )


def cancel_waiting(state: AccumulatorState) -> None:
    """Cancels waiting takes, because the accumulator or its mesh was closed or failed."""
    with state.lock:
        waiting = list(state.queue)
    for pending_take in waiting:
        with locked(pending_take.states):
            if not pending_take.done.is_set():
                pending_take.error = CancelledError(_cancelled(state))
                pending_take.leave()
    for other in dict.fromkeys(each for pending_take in waiting for each in pending_take.states):
        with locked([other]):
            incomplete = complete_ready([other])
        complete_multi(incomplete)


def complete_ready(states: Sequence[AccumulatorState]) -> list[PendingTake]:
    """Completes takes that are ready; returns those that need the locks of more accumulators.

    The caller holds the locks of the states.

    Returns:
        Takes at the head of a queue, for ``complete_multi``.
    """
    incomplete: list[PendingTake] = []
    progress = any([state.queue for state in states])  # mostly nobody waits
    held = set(states) if progress else set()
    while progress:
        progress = False
        for state in dict.fromkeys(states):
            head = state.queue[0] if state.queue else None
            if head is None or state.count < head.num_required:
                continue
            if not held.issuperset(head.states):
                if head not in incomplete:
                    incomplete.append(head)
            elif head.is_ready():
                _complete(head)
                progress = True
    return incomplete


def complete_multi(pending_takes: Sequence[PendingTake]) -> None:
    """Completes takes of several accumulators; the caller holds no lock."""
    waiting = list(pending_takes)
    while waiting:
        pending_take = waiting.pop()
        with locked(pending_take.states):
            if pending_take.done.is_set() or not pending_take.is_ready():
                continue
            _complete(pending_take)
            waiting += complete_ready(pending_take.states)


def _complete(pending_take: PendingTake) -> None:
    """Completes a take; on error, the waiting call raises it and the sums stay."""
    kinds = [state.kind for state in pending_take.states]
    devices = (device for state in pending_take.states for device in state.devices)
    try:
        with DeferInterrupts(), deadline_scope("take_grad", pending_take.deadline, devices):
            pending_take.taken = take_locked(pending_take.states)
    except Exception as error:
        pending_take.error = error
    else:
        pending_take.kinds = kinds
    pending_take.leave()


def _cancelled(state: AccumulatorState) -> str:
    """The message of a cancelled take: TensorFlow's words, and why the mesh failed."""
    reason = state.devices[0].mesh_state.reason
    text = "TakeGrad operation was cancelled"
    return text if reason is None else f"{text}: the mesh has failed: {reason}"


def _missing(pending_take: PendingTake, timeout: float | None) -> str:
    """The message of a timeout: which accumulators lack gradients, at most five."""
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
