"""How gradients get into accumulators: one decision under all locks, whatever is added.

A gradient that is dropped as stale launches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from gradreduce.device import compatible
from gradreduce.errors import InvalidArgumentError

from .dense_sums import add_dense
from .serve import serve_held
from .sparse_door import check_sum_shape
from .sparse_sums import SparseAdditions
from .state import Arrival, Ticket, locked

__all__ = ["apply_arrivals"]


def apply_arrivals(arrivals: Sequence[Arrival], local_step: int) -> tuple[bool, list[Ticket]]:
    """Adds all arrivals or, if the step is stale for any of them, drops all.

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
        if any(local_step < state.step for state in states):
            for arrival in arrivals:
                arrival.state.num_dropped += len(arrival.parts)
            return False, []
        for arrival in arrivals:
            _check_shape(arrival)
        _add(arrivals)
        for arrival in arrivals:
            state = arrival.state
            if state.count == 0:
                state.kind = arrival.kind
                state.sum_shape = arrival.shape
            state.count += len(arrival.parts)
        return True, serve_held(states)


def _check_shape(arrival: Arrival) -> None:
    """The sum's shape, exactly; the constructor's was checked at the door."""
    state = arrival.state
    if state.sparse:
        check_sum_shape(arrival)
        return
    shape = arrival.shape
    expected = state.sum_shape if state.count else state.shape
    if expected is not None and not compatible(shape, expected):
        raise InvalidArgumentError(f"Shape mismatch: expected {list(expected)}, got {list(shape)}")


def _add(arrivals: Sequence[Arrival]) -> None:
    """Sparse gradients are ready before the first launch that writes in place."""
    dense = [arrival for arrival in arrivals if not arrival.state.sparse]
    if len(dense) == len(arrivals):
        add_dense(dense)
        return
    sparse = SparseAdditions([arrival for arrival in arrivals if arrival.state.sparse])
    devices = [device for arrival in arrivals for device in arrival.state.devices]
    with devices[0].fabric.whole_or_lost(devices) if dense else nullcontext():
        add_dense(dense)
        sparse.launch()
    sparse.commit()
