"""What an accumulator is: the arguments that define it checked, all that it launches compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce.cross_device_ops import CrossDeviceOps
from gradreduce.device import (
    Device,
    DeviceLike,
    Mesh,
    accumulate_dtype,
    as_devices,
    as_dtype,
    default_mesh,
)
from gradreduce.errors import brief
from gradreduce.ops import prepare_all_sum
from gradreduce.presets import shared_ops

from .dense_sums import prepare_arrivals
from .door import DTYPES, as_shape
from .registry import shared_state, state_of
from .serve import cancel_waiting, forget
from .sparse_sums import prepare_sparse
from .state import AccumulatorState

__all__ = ["defined"]


def defined(
    dtype: Any,
    shape: Sequence[int | None] | None,
    shared_name: str | None,
    reduction_type: str,
    device: DeviceLike | Mesh | None,
    *,
    cross_device_ops: CrossDeviceOps | None = None,
    sparse: bool = False,
) -> AccumulatorState:
    """The state that a new handle is for: see ``ConditionalAccumulator`` for the arguments."""
    found = as_dtype(dtype)
    if found.name not in DTYPES:
        raise TypeError(f"dtype {found} is not one of {', '.join(DTYPES)}")
    if reduction_type not in ("MEAN", "SUM"):
        raise ValueError(f'reduction_type {brief(reduction_type)} not in: "MEAN", "SUM"')
    wanted = None if shape is None else as_shape(shape)
    reducer = shared_ops() if cross_device_ops is None else cross_device_ops
    if not isinstance(reducer, CrossDeviceOps):
        raise TypeError(f"cross_device_ops={brief(reducer)} is not a CrossDeviceOps")
    devices, over_mesh = _placed(device, state_of(shared_name), reducer.mesh)
    state = AccumulatorState(
        found, wanted, reduction_type, devices, over_mesh, reducer, sparse=sparse
    )
    if sparse:
        prepare_sparse(state)
    else:
        _prepare_dense(state)
    devices[0].fabric.add_listener(state, cancel_waiting, forget)
    return shared_state(shared_name, state, cross_device_ops)


def _placed(
    device: DeviceLike | Mesh | None, shared: AccumulatorState | None, mesh: Mesh | None
) -> tuple[tuple[Device, ...], bool]:
    """The devices of a definition, and whether they are a mesh; without one the shared state's."""
    if shared is not None:
        mesh = shared.devices[0].mesh
        if device is None:
            return shared.devices, shared.over_mesh
    if device is None:
        return default_mesh().devices[:1], False
    return as_devices(device, "device=", mesh), isinstance(device, Mesh)


def _prepare_dense(state: AccumulatorState) -> None:
    wide = accumulate_dtype(state.dtype)
    prepare_arrivals(state.devices, state.dtype, state.dtype)
    for device in state.devices:
        prepare_all_sum(device, state.dtype, wide)
    if state.over_mesh:
        state.ops.compile_for(state.devices, wide, state.dtype)
