"""Creates accumulators: validates arguments, compiles kernels, looks up shared names."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import Device, Mesh, ModuleLock, as_dtype
from gradreduce.errors import brief, listed
from gradreduce.reduce.all_reduce_ops import AllReduceCrossDeviceOps, is_all_reduce, shared_ops
from gradreduce.reduce.cross_device_ops import CrossDeviceOps

from .state import AccumulatorState, Storage
from .take_queue import cancel_waiting, discard_sums
from .validate import DTYPES, as_shape

# Weak references: dropping the last accumulator of a name frees its device memory.
_shared: weakref.WeakValueDictionary[str, AccumulatorState] = weakref.WeakValueDictionary()
_lock = ModuleLock()


def state_of(shared_name: str | None) -> AccumulatorState | None:
    """Returns the open accumulator that is registered as ``shared_name``, if any."""
    with _lock.lock:
        found = _shared.get(shared_name) if shared_name else None
        return None if found is None or found.closed else found


def shared_state(
    shared_name: str | None,
    state: AccumulatorState,
    cross_device_ops: CrossDeviceOps | None = None,
) -> AccumulatorState:
    """Returns the state registered as ``shared_name``, registering ``state`` if there is none.

    A state that was closed or inherited across a fork is replaced, even if it is still referenced.

    Args:
        shared_name: the constructor's argument.
        state: created from the constructor's other arguments.
        cross_device_ops: the constructor's ``cross_device_ops``, if passed.

    Raises:
        ValueError: the name is registered with other arguments.
    """
    if not shared_name:
        return state
    with _lock.lock:
        found = _shared.setdefault(shared_name, state)
        if found.closed or found.devices[0].mesh_state.is_inherited:
            found = _shared[shared_name] = state
    for field in ("sparse", "dtype", "shape", "reduction_type"):
        had, wanted = [
            each.storage.sparse if field == "sparse" else getattr(each, field)
            for each in (found, state)
        ]
        if had != wanted:
            raise ValueError(f"shared_name={brief(shared_name)} has {field} {had}, not {wanted}")
    if (found.devices, found.over_mesh) != (state.devices, state.over_mesh):
        had, wanted = (
            f"{'mesh of ' * of.over_mesh}{listed(each.name for each in of.devices)}"
            for of in (found, state)
        )
        other = " of another mesh" * (
            found.devices[0].mesh_state is not state.devices[0].mesh_state
        )
        raise ValueError(f"shared_name={brief(shared_name)} has device {had}, not {wanted}{other}")
    if (
        cross_device_ops is not None
        and found.over_mesh
        and _settings_of(found.cross_device_ops) != _settings_of(cross_device_ops)
    ):
        raise ValueError(
            f"shared_name={brief(shared_name)} has cross_device_ops "
            f"{found.cross_device_ops!r}, not {cross_device_ops!r}"
        )
    return found


def _settings_of(cross_device_ops: CrossDeviceOps) -> object:
    """A key that is equal for CrossDeviceOps that reduce in the same way."""
    if isinstance(cross_device_ops, AllReduceCrossDeviceOps) and is_all_reduce(cross_device_ops):
        return cross_device_ops.settings
    return cross_device_ops


def create_state(
    dtype: Any,
    shape: Sequence[int | None] | None,
    shared_name: str | None,
    reduction_type: str,
    device: DeviceLike | Mesh | None,
    cross_device_ops: CrossDeviceOps | None,
    storage: Storage,
) -> AccumulatorState:
    """Returns the state of a new accumulator; see ``ConditionalAccumulator`` for arguments."""
    found = as_dtype(dtype)
    if found.name not in DTYPES:
        raise TypeError(f"dtype={found} must be one of {', '.join(DTYPES)}")
    if reduction_type not in ("MEAN", "SUM"):
        raise ValueError(f'reduction_type {brief(reduction_type)} not in: "MEAN", "SUM"')
    wanted = None if shape is None else as_shape(shape)
    reducer = shared_ops() if cross_device_ops is None else cross_device_ops
    if not isinstance(reducer, CrossDeviceOps):
        raise TypeError(f"cross_device_ops={brief(reducer)} must be a CrossDeviceOps")
    devices, over_mesh = _placed(device, state_of(shared_name), reducer.mesh)
    state = AccumulatorState(found, wanted, reduction_type, devices, over_mesh, reducer, storage)
    storage.prepare(state)
    devices[0].mesh_state.add_listener(state, cancel_waiting, discard_sums)
    return shared_state(shared_name, state, cross_device_ops)


def _placed(
    device: DeviceLike | Mesh | None, shared: AccumulatorState | None, mesh: Mesh | None
) -> tuple[tuple[Device, ...], bool]:
    """The devices of an accumulator, and whether they are a mesh."""
    if shared is not None:
        mesh = shared.devices[0].mesh
        if device is None:
            return shared.devices, shared.over_mesh
    if device is None:
        return default_mesh().devices[:1], False
    return as_devices(device, "device=", mesh), isinstance(device, Mesh)
