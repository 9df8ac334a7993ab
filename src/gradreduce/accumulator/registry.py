"""Which accumulators of the process are one: those of the same ``shared_name``."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from .state import AccumulatorState

__all__ = ["shared_state"]

# Weak: dropping the last handle frees the device memory.
_shared: weakref.WeakValueDictionary[str, AccumulatorState] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_state(shared_name: str | None, state: AccumulatorState) -> AccumulatorState:
    """The state that ``shared_name`` stands for: ``state``, if it is the first of that name.

    One that was closed has given its name up, whoever still holds a handle of it.

    Raises:
        ValueError: the name stands for an accumulator of another definition.
    """
    if not shared_name:
        return state
    with _lock:
        found = _shared.setdefault(shared_name, state)
        if found.closed:
            found = _shared[shared_name] = state
    for field in ("sparse", "dtype", "shape", "reduction_type", "devices", "over_mesh", "ops"):
        had, wanted = (_defined(each, field) for each in (found, state))
        if had != wanted:
            raise ValueError(f"shared_name={shared_name!r} has {field} {had}, not {wanted}")
    return found


def _defined(state: AccumulatorState, field: str) -> Any:
    """What both definitions must have: of what reduces a mesh's sums, how it does that."""
    if field == "ops":
        return state.ops.settings if state.over_mesh else None
    return getattr(state, field)
