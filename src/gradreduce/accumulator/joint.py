"""Many accumulators in one call: added to by one decision, taken from by one place in each queue.

Source: own; TensorFlow has one accumulator to a call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from gradreduce.device import Buffer, DeferInterrupts, as_deadline, as_flag
from gradreduce.errors import brief
from gradreduce.indexed_slices import as_slices
from gradreduce.interop import Kind, OneCall, as_result_kind, from_buffer, hand_back, reading
from gradreduce.values import Mirrored, Part
from gradreduce.variables import Variable

from .apply import apply_arrivals, drop_stale, is_stale
from .base import ConditionalAccumulatorBase
from .door import (
    DEFAULT_STEP,
    arrival,
    as_required,
    as_step,
    as_timeout,
    check_together,
    for_each,
    num_gradients,
)
from .serve import await_ticket, join, serve_joint, withdraw
from .sparse_door import num_sparse_gradients, sparse_arrival
from .state import AccumulatorState, Arrival, SparseGradient, Ticket, locked
from .take import take_held

__all__ = ["apply_grads", "take_grads", "take_now"]

_log = logging.getLogger(__name__)


def apply_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    grads: Sequence[Any],
    local_step: int | Variable = DEFAULT_STEP,
    *,
    cast: bool = False,
) -> bool:
    """Adds one gradient to each accumulator, all or none: one decision under all locks.

    One launch on each physical device serves all that are of one dtype and the first since a take,
    and one all that are not; one all sparse ones of a dtype.

    Args:
        accumulators: each at most once.
        grads: one for each; see ``ConditionalAccumulator.apply_grad``.
        local_step: of all of them; see there.
        cast: as there.

    Returns:
        True if all were added, False if all were dropped, because the step is stale for one.

    Raises:
        ValueError: other numbers of accumulators and gradients, an accumulator twice, or what
            ``apply_grad`` raises. Nothing was added.
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
    given = [(state, grad, cast) for state, grad in zip(states, grads, strict=True)]
    name_of = partial(_name_of, accumulators)
    if is_stale(states, step):  # what will be dropped need not become a Buffer
        counts = for_each(_num_gradients, given, name_of)
        if drop_stale(states, counts, step):
            return False
    with OneCall():
        arrivals = for_each(_arrival, given, name_of)
        reading([_rows_of(part) for each in arrivals for _, part in each.parts])
        with DeferInterrupts():  # the takes that it satisfies are served with it
            kept, joint = apply_arrivals(arrivals, step, name_of)
            serve_joint(joint)
            hand_back()
    return kept


def _name_of(accumulators: Sequence[ConditionalAccumulatorBase], place: int) -> str:
    """What an error calls the gradient for one of them."""
    name = f"accumulator {accumulators[place].name!r}"
    return name if len(accumulators) == 1 else f"grads[{place}], for {name}"


def _warn_of_default(accumulators: Sequence[ConditionalAccumulatorBase]) -> None:
    """Once for each accumulator: no error, because TensorFlow's default is 0 too."""
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
            "accumulator %r is at step %d and dropped a gradient that came without local_step, "
            "which counts as step 0: pass local_step=accumulator.global_step, as it was when the "
            "gradient was computed",
            *untold[0],
        )  # fmt: skip


def _listed(accumulators: Any) -> tuple[ConditionalAccumulatorBase, ...]:
    if isinstance(accumulators, ConditionalAccumulatorBase):
        raise TypeError(
            f"accumulators={brief(accumulators)} must be a list of accumulators: put it in one"
        )
    return tuple(accumulators)


def _states_of(accumulators: Sequence[ConditionalAccumulatorBase]) -> list[AccumulatorState]:
    """Checked: whether one call may be about all of them."""
    for place, each in enumerate(accumulators):
        if not isinstance(each, ConditionalAccumulatorBase):
            raise TypeError(f"accumulators[{place}]={brief(each)} is not an accumulator")
    states = [each.accumulator_ref for each in accumulators]
    check_together(states)
    return states


def _shown(part: Part, kind: Kind) -> Any:
    return from_buffer(part, kind) if isinstance(part, Buffer) else part.shown(kind)


def _rows_of(part: Buffer | SparseGradient) -> Buffer:
    return part if isinstance(part, Buffer) else part.values


def _num_gradients(state: AccumulatorState, grad: Any, cast: bool) -> int:
    made = num_sparse_gradients if state.sparse else num_gradients
    return made(state, as_slices(grad), cast)


def _arrival(state: AccumulatorState, grad: Any, cast: bool) -> Arrival:
    made = sparse_arrival if state.sparse else arrival
    return made(state, as_slices(grad), cast)


def take_grads(
    accumulators: Sequence[ConditionalAccumulatorBase],
    num_required: int | Variable,
    *,
    timeout: float | None = None,
    as_kind: str | None = None,
    deadline: float | None = None,
) -> list[Any]:
    """Takes from all accumulators together, when each holds ``num_required`` gradients.

    Blocks. One place in every queue, taken at once, so that two joint takes never wait for each
    other. Those over a mesh travel in one batch, if the same ops reduce them and MEAN divides
    them by the same number; all sparse ones in one. Gradients that were added or taken together may
    share one block of memory, which is freed with the last of them. Ctrl-C loses nothing while this
    waits; one that comes in the moment in which it is served takes the gradients with it.

    Args:
        accumulators: each at most once.
        num_required: of each, at least 1; an integer, or a Variable that holds one.
        timeout: seconds to wait; None for ever.
        as_kind: as there.
        deadline: see ``ConditionalAccumulator.take_grad``.

    Returns:
        One gradient for each accumulator, as ``ConditionalAccumulator.take_grad`` gives it.

    Raises:
        InvalidArgumentError: ``num_required`` is less than 1.
        ValueError: no accumulator, or one twice.
        DeadlineExceededError: the time ran out; nothing was taken.
        CancelledError: an accumulator was closed, or the mesh died while this waited.
        CollectiveError: the mesh is dead.
    """
    required, limit, seconds = as_required(num_required), as_timeout(timeout), as_deadline(deadline)
    as_result_kind(as_kind, "native")  # a wrong name must not cost a gradient
    ticket = Ticket(tuple(_states_of(_listed(accumulators))), required, seconds)
    try:
        join(ticket)
        await_ticket(ticket, limit)
    except BaseException:
        withdraw(ticket)
        raise
    return _handed_out(ticket, as_kind)


def take_now(
    accumulators: Sequence[ConditionalAccumulatorBase], num_required: int
) -> list[Any] | None:
    """As ``take_grads``, but never blocks, and an accumulator that holds nothing gives None.

    Takes when the fullest holds ``num_required`` and no other take waits; otherwise returns None
    and takes nothing. Every accumulator's step goes one further, the empty ones' too.
    """
    states = [each.accumulator_ref for each in accumulators]
    with locked(states):
        for state in states:
            state.check_open()
        if any(state.queue for state in states):
            return None
        if max(state.count for state in states) < num_required:
            return None
        ticket = Ticket(tuple(states), num_required, kinds=[state.kind for state in states])
        ticket.taken = take_held(states)
    return _handed_out(ticket)


def _handed_out(ticket: Ticket, as_kind: str | None = None) -> list[Any]:
    """The taken Buffers as what callers get."""
    given: list[Any] = []
    with OneCall():
        for state, buffers, first in zip(ticket.states, ticket.taken, ticket.kinds, strict=True):
            kind = as_result_kind(as_kind, first)
            if not buffers:
                given.append(None)
            elif state.over_mesh:
                given.append(Mirrored.of(buffers, kind))
            else:
                given.append(_shown(buffers[0], kind))
    return given
