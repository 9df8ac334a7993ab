"""What a checkpoint of an accumulator holds, and how one is put back; never writes a file.

All of it is host data, so that it is loaded on another backend, and kept by any store: integers,
strings, None, lists of integers or None, and arrays of float32 or float64.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gradreduce.errors import CollectiveError

from .saved_check import checked_state
from .saved_sums import sums_of
from .serve import serve_held, serve_joint
from .state import AccumulatorState

__all__ = ["load_state", "saved_state"]


def saved_state(state: AccumulatorState, deadline: float | None) -> dict[str, Any]:
    """See ``ConditionalAccumulatorBase.state_dict``.

    Under the lock only copies are queued, because later applies add in place; the host waits for
    them when it is free again.

    Args:
        state: whose.
        deadline: seconds from ``as_deadline``, for all downloads together.
    """
    end = None if deadline is None else time.monotonic() + deadline
    sums = sums_of(state)
    fabric = state.devices[0].fabric
    with state.lock:
        state.check_open()
        state.check_devices()
        generation = fabric.generation
        filled = state.count > 0
        made: dict[str, Any] = {
            "format": sums.format,
            "dtype": str(state.dtype),
            "reduction_type": state.reduction_type,
            "shape": None if state.shape is None else list(state.shape),
            "global_step": state.step,
            "num_accumulated": state.count,
            "num_dropped": state.num_dropped,
            "sum_shape": None if state.sum_shape is None else list(state.sum_shape),
            "kind": state.kind if filled else None,
        }
        copies = [None if total is None else sums.copied(total) for total in state.totals]
    made["partial_sums"] = [
        None if copy is None else sums.downloaded(copy, _rest(end)) for copy in copies
    ]
    if fabric.has_died(generation):  # and was reset, before a download could notice
        raise CollectiveError("the mesh died while the state of an accumulator was read")
    return made


def _rest(end: float | None) -> float | None:
    """Seconds until then; what is over by now has come to its end in time."""
    return None if end is None else max(end - time.monotonic(), 1e-6)


def load_state(state: AccumulatorState, given: Mapping[str, Any]) -> None:
    """See ``ConditionalAccumulatorBase.load_state_dict``.

    Checks, uploads, and then exchanges all under the lock: what fails has changed nothing.
    """
    fabric = state.devices[0].fabric
    generation = fabric.generation
    checked = checked_state(state, given)
    sums = sums_of(state)
    totals = [
        None if host is None else sums.uploaded(device, host)
        for device, host in zip(state.devices, checked.hosts, strict=True)
    ]
    with state.lock:
        state.check_open()
        state.check_devices()
        if fabric.has_died(generation):  # and was reset: what was uploaded is nobody's promise
            raise CollectiveError("the mesh died while the state of an accumulator was loaded")
        state.step = checked.step
        state.count = checked.count
        state.num_dropped = checked.num_dropped
        state.sum_shape = checked.sum_shape
        state.kind = checked.kind
        state.totals = totals
        joint = serve_held([state])
    serve_joint(joint)
