"""How gradients get into accumulators: one decision under all locks, whatever is added.

A gradient that is dropped as stale launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from gradreduce.device import compatible
from gradreduce.errors import InvalidArgumentError

from .dense_sums import DenseAdditions
from .door import for_each
from .serve import serve_held
from .sparse_door import check_sum_shape
from .sparse_sums import SparseAdditions
from .state import AccumulatorState, Arrival, Ticket, locked

__all__ = ["apply_arrivals", "drop_stale", "is_stale"]


def is_stale(states: Sequence[AccumulatorState], local_step: int) -> bool:
    """Whether gradients of this step are stale for one of the states, as they are now."""
    return any([local_step < state.step for state in states])


def drop_stale(states: Sequence[AccumulatorState], counts: Sequence[int], local_step: int) -> bool:
    """Drops gradients that have not become Buffers, if they are stale.

    Args:
        states: for each of which some came.
        counts: how many.
        local_step: of all of them.

    Returns:
        False if they are not stale any more.

    Raises:
        CancelledError: an accumulator was closed.
        BackendUnavailableError: the mesh was closed, or lost a device.
        CollectiveError: the mesh is dead.
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


def apply_arrivals(
    arrivals: Sequence[Arrival], local_step: int, name_of: Callable[[int], str]
) -> tuple[bool, list[Ticket]]:
    """Adds all arrivals or, if the step is stale for any of them, drops all.

    Args:
        arrivals: one for each accumulator.
        local_step: of all of them.
        name_of: what an error calls the one of that place.

    Returns:
        Whether they were kept; and the joint takes that may now be served, which the caller must
        do after this call, when no lock is held.

    Raises:
        CancelledError: an accumulator was closed.
        InvalidArgumentError: the shape differs from what a sum holds. Nothing was added.
    """
    states = [arrival.state for arrival in arrivals]
    with locked(states):
        for state in states:
            state.check_open()
        if is_stale(states, local_step):
            for arrival in arrivals:
                arrival.state.num_dropped += len(arrival.parts)
            return False, []
        for_each(_check_shape, [(arrival,) for arrival in arrivals], name_of)
        _add(arrivals)
        return True, serve_held(states)


def _check_shape(arrival: Arrival) -> None:
    """The sum's shape, exactly; the constructor's was checked at the door."""
    state = arrival.state
    if state.sparse:
        check_sum_shape(arrival)
        return
    shape = arrival.shape
    expected = state.sum_shape if state.count else state.shape
    if expected is not None and shape != expected and not compatible(shape, expected):
        raise InvalidArgumentError(f"Shape mismatch: expected {list(expected)}, got {list(shape)}")


def _add(arrivals: Sequence[Arrival]) -> None:
    """All are ready before the first launch, and what goes into new memory goes first.

    A failure between the first launch in place and the count leaves sums of which nobody can tell
    what is in them: then their devices are lost.
    """
    sparse = [arrival for arrival in arrivals if arrival.state.sparse]
    dense = [arrival for arrival in arrivals if not arrival.state.sparse] if sparse else arrivals
    additions: list[DenseAdditions | SparseAdditions] = []
    if sparse:
        additions.append(SparseAdditions(sparse))
    if dense:
        additions.append(DenseAdditions(dense))
    for each in additions:
        each.launch_apart()
    kept = [device for each in additions for device in each.kept]
    with kept[0].fabric.whole_or_lost(kept) if kept else nullcontext():
        for each in additions:
            each.launch_in_place()
        _count(arrivals, additions)


def _count(
    arrivals: Sequence[Arrival], additions: Sequence[DenseAdditions | SparseAdditions]
) -> None:
    """Each accumulator changes at once."""
    totals = {arrival.state: list(arrival.state.totals) for arrival in arrivals}
    for each in additions:
        for state, place, total in each.totals():
            totals[state][place] = total
    for arrival in arrivals:
        state, count = arrival.state, arrival.state.count
        if count:
            state.become(totals=totals[state], count=count + len(arrival.parts))
        else:
            state.become(
                totals=totals[state],
                count=len(arrival.parts),
                kind=arrival.kind,
                sum_shape=arrival.shape,
            )
