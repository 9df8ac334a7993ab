"""Which accumulators of the process are one: those of the same ``shared_name``."""

from __future__ import annotations

import weakref

from gradreduce.cross_device import AllReduceCrossDeviceOps, is_all_reduce
from gradreduce.cross_device_ops import CrossDeviceOps
from gradreduce.device import ModuleLock
from gradreduce.errors import brief, listed

from .state import AccumulatorState

__all__ = ["shared_state", "state_of"]

# Weak: dropping the last handle frees the device memory.
_shared: weakref.WeakValueDictionary[str, AccumulatorState] = weakref.WeakValueDictionary()
_lock = ModuleLock()


def state_of(shared_name: str | None) -> AccumulatorState | None:
    """What ``shared_name`` stands for now, unless it was closed."""
    with _lock.lock:
        found = _shared.get(shared_name) if shared_name else None
        return None if found is None or found.closed else found


def shared_state(
    shared_name: str | None,
    state: AccumulatorState,
    named_ops: CrossDeviceOps | None = None,
) -> AccumulatorState:
    """The state that ``shared_name`` stands for: ``state``, if it is the first of that name.

    One that was closed, or is from before a fork, has given its name up, whoever still holds a
    handle of it.

    Args:
        shared_name: as given.
        state: of this definition.
        named_ops: what is to reduce the sums of a mesh, if the definition says it.

    Raises:
        ValueError: the name stands for an accumulator of another definition.
    """
    if not shared_name:
        return state
    with _lock.lock:
        found = _shared.setdefault(shared_name, state)
        if found.closed or found.devices[0].fabric.is_inherited:
            found = _shared[shared_name] = state
    for field in ("sparse", "dtype", "shape", "reduction_type"):
        had, wanted = getattr(found, field), getattr(state, field)
        if had != wanted:
            raise ValueError(f"shared_name={brief(shared_name)} has {field} {had}, not {wanted}")
    if (found.devices, found.over_mesh) != (state.devices, state.over_mesh):
        had, wanted = (
            f"{'mesh of ' * of.over_mesh}{listed(each.name for each in of.devices)}"
            for of in (found, state)
        )
        other = " of another mesh" * (found.devices[0].fabric is not state.devices[0].fabric)
        raise ValueError(f"shared_name={brief(shared_name)} has device {had}, not {wanted}{other}")
    if named_ops is not None and found.over_mesh and _way(found.ops) != _way(named_ops):
        raise ValueError(
            f"shared_name={brief(shared_name)} has cross_device_ops {found.ops!r}, not "
            f"{named_ops!r}"
        )
    return found


def _way(ops: CrossDeviceOps) -> object:
    """In what two of them must agree to reduce alike."""
    if isinstance(ops, AllReduceCrossDeviceOps) and is_all_reduce(ops):
        return ops.settings
    return ops
