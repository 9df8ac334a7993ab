"""Applies to or takes from several accumulators in one call, all or none.

A call holds the locks of all its accumulators. A stale gradient launches nothing.
Source: own; TensorFlow has one accumulator to a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from gradreduce.arrays.caller_streams import StreamScope, release_inputs
from gradreduce.arrays.convert import as_result_kind, from_buffer
from gradreduce.arrays.convert_gpu import Kind, wait_for_inputs
from gradreduce.arrays.distributed import Mirrored, Part
from gradreduce.arrays.indexed_slices import as_slices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DeferInterrupts, as_deadline, as_flag, compatible
from gradreduce.errors import InvalidArgumentError, brief

from .base import ConditionalAccumulatorBase
from .dense_storage import DenseAdditions
from .sparse_storage import SparseAdditions
from .state import AccumulatorState, PendingGradient, PendingTake, SparseGradient, locked
from .take_queue import await_take, complete_multi, complete_ready, join, take_locked, withdraw
from .validate import (
    DEFAULT_STEP,
    as_required,
    as_step,
    as_timeout,
    check_distinct,
    check_sum_shape,
    for_each,
    num_gradients,
    num_sparse_gradients,
    pending_gradient,
    pending_sparse_gradient,
)


def is_stale(states: Sequence[AccumulatorState], local_step: int) -> bool:
    """Whether gradients of this step are stale for any of the states."""
    return any([local_step < state.step for state in states])


def drop_stale(states: Sequence[AccumulatorState], counts: Sequence[int], local_step: int) -> bool:
    """Drops gradients that were not converted yet, if they are still stale.

    Args:
        states: the accumulators.
        counts: the number of gradients for each.
        local_step: of all gradients.

    Returns:
        False if they are not stale any more.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: the mesh was closed, or a device failed.
        CollectiveError: the mesh has failed.
    """
    with locked(states):
        for state in states:
            state.check_open()
            state.check_devices()
        if not is_stale(states, local_step):
            return False
        for state, count in zip(states, counts, strict=True):
            state.num_dropped += count
        return True


def apply_pending(
    pending_gradients: Sequence[PendingGradient], local_step: int, name_of: Callable[[int], str]
) -> tuple[bool, list[PendingTake]]:
    """Adds all gradients; drops all if the step is stale for any accumulator.

    Args:
        pending_gradients: one for each accumulator.
        local_step: of all of them.
        name_of: the name of a gradient in errors, from its index.

    Returns:
        Whether they were added; and the takes of several accumulators that may now complete, which
        the caller must pass to ``complete_multi`` after this call, when no lock is held.

    Raises:
        CancelledError: an accumulator was closed.
        InvalidArgumentError: the shape differs from that of the sum. Nothing was added.
    """
    states = [pending.state for pending in pending_gradients]
    with locked(states):
        for state in states:
            state.check_open()
        if is_stale(states, local_step):
            for pending in pending_gradients:
                pending.state.num_dropped += len(pending.parts)
            return False, []
        for_each(_check_shape, [(pending,) for pending in pending_gradients], name_of)
        _add(pending_gradients)
        return True, complete_ready(states)


def _check_shape(pending: PendingGradient) -> None:
    """Checks the shape against the sum's; validation checked the constructor's."""
    state = pending.state
    if state.sparse:
        check_sum_shape(pending)
        return
    shape = pending.shape
    expected = state.sum_shape if state.count else state.shape
    if expected is not None and shape != expected and not compatible(shape, expected):
        raise InvalidArgumentError(f"Shape mismatch: expected {list(expected)}, got {list(shape)}")


def _add(pending_gradients: Sequence[PendingGradient]) -> None:
    """Launches the additions: first those into new memory, then those in place.

    A failure between the first launch in place and the update of the counts leaves sums with
    undefined contents: then their devices are marked as failed.
    """
    sparse = [pending for pending in pending_gradients if pending.state.sparse]
    dense = (
        [pending for pending in pending_gradients if not pending.state.sparse]
        if sparse
        else pending_gradients
    )
    additions: list[DenseAdditions | SparseAdditions] = []
    if sparse:
        additions.append(SparseAdditions(sparse))
    if dense:
        additions.append(DenseAdditions(dense))
    for each in additions:
        each.launch_out_of_place()
    kept = [device for each in additions for device in each.kept]
    with kept[0].mesh_state.fail_on_partial_write(kept) if kept else nullcontext():
        for each in additions:
            each.launch_in_place()
        _count(pending_gradients, additions)


def _count(
    pending_gradients: Sequence[PendingGradient],
    additions: Sequence[DenseAdditions | SparseAdditions],
) -> None:
    """Stores the new sums and counts."""
    totals = {pending.state: list(pending.state.totals) for pending in pending_gradients}
    for each in additions:
        for state, index, total in each.totals():
            totals[state][index] = total
    for pending in pending_gradients:
        state, count = pending.state, pending.state.count
        if count:
            state.update(totals=totals[state], count=count + len(pending.parts))
        else:
            state.update(
                totals=totals[state],
                count=len(pending.parts),
                kind=pending.kind,
                sum_shape=pending.shape,
            )


_log = logging.getLogger(__name__)


def apply_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    grads: Sequence[Any],
    local_step: int | Variable = DEFAULT_STEP,
    *,
    cast: bool = False,
) -> bool:
    """Adds one gradient to each accumulator; adds all or drops all.

    Each GPU gets one launch for all gradients of one dtype that are the first since a take, one for
    those that are not, and one for the sparse gradients of one dtype.

    Args:
        accumulators: each at most once.
        grads: one for each; see ``ConditionalAccumulator.apply_grad``.
        local_step: of all of them; see there.
        cast: see there.

    Returns:
        True if all were added, False if all were dropped because the step is stale for one.

    Raises:
        ValueError: the numbers of accumulators and gradients differ, an accumulator is passed
            twice, or as in ``apply_grad``. Nothing was added.
    """
    step, cast = as_step("local_step", local_step), as_flag("cast", cast)
    accumulators, grads = _listed(accumulators), tuple(grads)
    states = _states_of(accumulators)
    if len(states) != len(grads):
        raise ValueError(
            f"grads has {len(grads)} entries, accumulators has {len(states)}; pass one gradient "
            "for each accumulator"
        )
    kept = _all_or_none(accumulators, grads, step, cast)
    if not kept and local_step is DEFAULT_STEP:
        _warn_of_default(accumulators)
    return kept


def _all_or_none(
    accumulators: Sequence[ConditionalAccumulatorBase], grads: Sequence[Any], step: int, cast: bool
) -> bool:
    states = [each.accumulator_ref for each in accumulators]
    calls = [(state, grad, cast) for state, grad in zip(states, grads, strict=True)]
    name_of = partial(_name_of, accumulators)
    if is_stale(states, step):  # gradients that will be dropped are not converted
        counts = for_each(_num_gradients, calls, name_of)
        if drop_stale(states, counts, step):
            return False
    with StreamScope():
        pending_gradients = for_each(_pending_gradient, calls, name_of)
        wait_for_inputs([_rows_of(part) for each in pending_gradients for _, part in each.parts])
        with DeferInterrupts():  # also completes the takes that now have enough
            kept, incomplete = apply_pending(pending_gradients, step, name_of)
            complete_multi(incomplete)
            release_inputs()
    return kept


def _name_of(accumulators: Sequence[ConditionalAccumulatorBase], index: int) -> str:
    """The name of a gradient in errors."""
    name = f"accumulator {accumulators[index].name!r}"
    return name if len(accumulators) == 1 else f"grads[{index}], for {name}"


def _warn_of_default(accumulators: Sequence[ConditionalAccumulatorBase]) -> None:
    """Warns once for each accumulator that a gradient came without ``local_step``."""
    states = [each.accumulator_ref for each in accumulators]
    with locked(states):
        untold = [
            (each.name, state.step)
            for each, state in zip(accumulators, states, strict=True)
            if state.step > DEFAULT_STEP and not state.has_warned
        ]
        for state in states:
            state.has_warned = state.has_warned or state.step > DEFAULT_STEP
    if untold:  # a handler may do anything: no lock is held
        _log.warning(
            "accumulator %r is at step %d and dropped a gradient without local_step, which "
            "defaults to 0: pass local_step=accumulator.global_step, read before the gradient was "
            "computed",
            *untold[0],
        )  # fmt: skip


def _listed(accumulators: Any) -> tuple[ConditionalAccumulatorBase, ...]:
    if isinstance(accumulators, ConditionalAccumulatorBase):
        raise TypeError(
            f"accumulators={brief(accumulators)} must be a list of accumulators: pass [accumulator]"
        )
    return tuple(accumulators)


def _states_of(accumulators: Sequence[ConditionalAccumulatorBase]) -> list[AccumulatorState]:
    """Checks that one call can use all of them, and returns their states."""
    for index, each in enumerate(accumulators):
        if not isinstance(each, ConditionalAccumulatorBase):
            raise TypeError(f"accumulators[{index}]={brief(each)} must be an accumulator")
    states = [each.accumulator_ref for each in accumulators]
    check_distinct(states)
    return states


def _as_result(part: Part, kind: Kind) -> Any:
    return from_buffer(part, kind) if isinstance(part, Buffer) else part._as_result(kind)


def _rows_of(part: Buffer | SparseGradient) -> Buffer:
    return part if isinstance(part, Buffer) else part.values


def _num_gradients(state: AccumulatorState, grad: Any, cast: bool) -> int:
    made = num_sparse_gradients if state.sparse else num_gradients
    return made(state, as_slices(grad), cast)


def _pending_gradient(state: AccumulatorState, grad: Any, cast: bool) -> PendingGradient:
    made = pending_sparse_gradient if state.sparse else pending_gradient
    return made(state, as_slices(grad), cast)


def take_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    num_required: int | Variable,
    *,
    timeout: float | None = None,
    output_type: str | None = None,
    deadline: float | None = None,
) -> list[Any]:
    """Blocks until each accumulator has ``num_required`` gradients, then takes from all.

    The call joins all queues at once, so that two such calls do not deadlock. Accumulators over a
    mesh are reduced in one batch if they have the same ``cross_device_ops`` and divisor; all sparse
    ones in one batch. Results that were added or taken together may share one block of memory,
    which is freed with the last of them. Ctrl-C while this waits takes nothing; Ctrl-C in the
    moment in which the take completes discards the result.

    Args:
        accumulators: each at most once.
        num_required: of each, at least 1; an integer, or a Variable that holds one.
        timeout: seconds to wait for gradients; None waits without limit.
        output_type: see ``ConditionalAccumulator.take_grad``.
        deadline: see there.

    Returns:
        One gradient for each accumulator, as its ``take_grad`` returns it.

    Raises:
        InvalidArgumentError: ``num_required`` is less than 1.
        ValueError: ``accumulators`` is empty, or has an accumulator twice.
        DeadlineExceededError: the timeout expired; nothing was taken.
        CancelledError: an accumulator was closed, or the mesh failed while this waited.
        CollectiveError: the mesh has failed.
    """
    required, limit, seconds = as_required(num_required), as_timeout(timeout), as_deadline(deadline)
    as_result_kind(output_type, "native")  # checked before anything is taken
    pending_take = PendingTake(tuple(_states_of(_listed(accumulators))), required, seconds)
    try:
        join(pending_take)
        await_take(pending_take, limit)
    except BaseException:
        withdraw(pending_take)
        raise
    return _results_of(pending_take, output_type)


def take_now(
    accumulators: Sequence[ConditionalAccumulatorBase], num_required: int
) -> list[Any] | None:
    """As ``take_grads`` without blocking; the entry of an empty accumulator is None.

    Takes if at least one accumulator has ``num_required`` gradients and no other take waits;
    otherwise returns None and takes nothing. The step of every accumulator goes up by one, also of
    empty ones.
    """
    states = [each.accumulator_ref for each in accumulators]
    with locked(states):
        for state in states:
            state.check_open()
        if any(state.queue for state in states):
            return None
        if max(state.count for state in states) < num_required:
            return None
        pending_take = PendingTake(
            tuple(states), num_required, kinds=[state.kind for state in states]
        )
        pending_take.taken = take_locked(states)
    return _results_of(pending_take)


def _results_of(pending_take: PendingTake, output_type: str | None = None) -> list[Any]:
    """Converts the taken Buffers to the arrays that callers get."""
    results: list[Any] = []
    with StreamScope():
        for state, buffers, first in zip(
            pending_take.states, pending_take.taken, pending_take.kinds, strict=True
        ):
            kind = as_result_kind(output_type, first)
            if not buffers:
                results.append(None)
            elif state.over_mesh:
                results.append(Mirrored.of(buffers, kind))
            else:
                results.append(_as_result(buffers[0], kind))
    return results
