"""Creates accumulators: validates arguments, compiles kernels, looks up shared names."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.types import SparseMean
from gradreduce.backends import default_mesh
from gradreduce.backends.device_names import DeviceLike, as_devices
from gradreduce.device import Device, Mesh, ModuleLock, accumulate_dtype, as_dtype
from gradreduce.device.process_group import check_one_process
from gradreduce.errors import brief, listed
from gradreduce.reduce.all_reduce_ops import is_all_reduce
from gradreduce.reduce.cross_device_ops import CrossDeviceOps
from gradreduce.reduce.presets import shared_ops

from .state import AccumulatorState, Storage
from .take_queue import cancel_waiting, discard_sums
from .validate import DTYPES, as_shape

# Weak references, so that the device memory is freed with the last accumulator of a name.
_shared: weakref.WeakValueDictionary[str, AccumulatorState] = weakref.WeakValueDictionary()
_lock = ModuleLock()


def create_state(  # noqa: PLR0913  # options of one call
    dtype: Any,
    shape: Sequence[int | None] | None,
    shared_name: str | None,
    reduction_type: str,
    device: DeviceLike | Mesh | None,
    cross_device_ops: CrossDeviceOps | None,
    storage: Storage,
    sparse_mean: SparseMean | None = None,
) -> AccumulatorState:
    """Returns the state of a new accumulator, or the one registered as ``shared_name``.

    A registered state that was closed, or inherited by a fork, is replaced, even if accumulators
    still refer to it. See ``ConditionalAccumulator`` for arguments and errors.
    """
    found = as_dtype(dtype)
    if found.name not in DTYPES:
        raise TypeError(f"dtype={found} must be one of {', '.join(DTYPES)}")
    if reduction_type not in ("MEAN", "SUM"):
        raise ValueError(f'reduction_type {brief(reduction_type)} not in: "MEAN", "SUM"')
    wanted = None if shape is None else as_shape(shape)
    reducer = shared_ops() if cross_device_ops is None else cross_device_ops
    if not isinstance(reducer, CrossDeviceOps):
        raise TypeError(f"cross_device_ops={brief(reducer)} must be a CrossDeviceOps")
    devices, over_mesh = _placed(device, shared_name or "", reducer.mesh)
    if shared_name:
        instead = "use the accumulators of gradreduce.ray, which several processes share by name"
        check_one_process(devices[0], f"shared_name={brief(shared_name)}", instead)
    state = AccumulatorState(
        found, wanted, reduction_type, devices, over_mesh, reducer, storage, sparse_mean
    )
    if over_mesh and storage.is_sparse and not is_all_reduce(reducer):
        raise TypeError(
            f"cross_device_ops={brief(reducer)} must be an AllReduceCrossDeviceOps: a "
            "SparseConditionalAccumulator merges rows on its first device"
        )
    storage.compile(state, found)
    if over_mesh and not storage.is_sparse:
        reducer.compile_sums(devices, accumulate_dtype(found), found)
    state.mesh_state.add_listener(state, cancel_waiting, discard_sums)
    return _registered(shared_name, state, cross_device_ops) if shared_name else state


def _placed(
    device: DeviceLike | Mesh | None, shared_name: str, mesh: Mesh | None
) -> tuple[tuple[Device, ...], bool]:
    """Returns the devices of an accumulator, and whether its results are ``Mirrored``."""
    with _lock.lock:
        shared = _shared.get(shared_name)
    if shared is not None and not shared.closed:
        mesh = shared.devices[0].mesh
        if device is None:
            return shared.devices, shared.over_mesh
    if device is None:
        return default_mesh().devices[:1], False
    return as_devices(device, "device=", mesh), isinstance(device, Mesh)


def _registered(
    shared_name: str, state: AccumulatorState, cross_device_ops: CrossDeviceOps | None
) -> AccumulatorState:
    """Returns the state registered as ``shared_name``; registers ``state`` if there is none.

    Args:
        shared_name: the constructor's argument.
        state: created from the constructor's other arguments.
        cross_device_ops: the constructor's argument.

    Raises:
        ValueError: the name is registered with other arguments.
    """
    with _lock.lock:
        found = _shared.setdefault(shared_name, state)
        if found.closed or found.mesh_state.is_inherited:
            found = _shared[shared_name] = state
    differing: list[tuple[str, Any, Any]] = [
        (name, had, wanted)
        for name, had, wanted in (
            ("format", found.storage.format, state.storage.format),
            ("dtype", found.dtype, state.dtype),
            ("shape", found.shape, state.shape),
            ("reduction_type", found.reduction_type, state.reduction_type),
            ("sparse_mean", found.sparse_mean, state.sparse_mean),
        )
        if had != wanted
    ]
    if (found.devices, found.over_mesh) != (state.devices, state.over_mesh):
        had, wanted = (
            f"{'mesh of ' * each.over_mesh}{listed(device.name for device in each.devices)}"
            for each in (found, state)
        )
        same_mesh = found.mesh_state is state.mesh_state
        differing.append(("device", had, wanted if same_mesh else f"{wanted} of another mesh"))
    if (
        cross_device_ops is not None
        and found.over_mesh
        and _settings_of(found.cross_device_ops) != _settings_of(cross_device_ops)
    ):
        differing.append(("cross_device_ops", found.cross_device_ops, cross_device_ops))
    if differing:
        name, had, wanted = differing[0]
        raise ValueError(f"shared_name={brief(shared_name)} has {name} {had}, not {wanted}")
    return found


def _settings_of(cross_device_ops: CrossDeviceOps) -> object:
    """Returns a key that is equal for CrossDeviceOps that reduce in the same way."""
    settings = getattr(cross_device_ops, "settings", cross_device_ops)
    return type(cross_device_ops).reduce_batch, settings
