"""What may enter an accumulator: gradients, steps and shapes, checked before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from gradreduce.device import Buffer, compatible
from gradreduce.interop import is_array, kind_of, to_buffer
from gradreduce.values import IndexedSlices, PerReplica, current_replica
from gradreduce.variables import Variable

from .apply import Arrival
from .state import AccumulatorState

__all__ = ["DTYPES", "arrival", "as_shape", "as_step", "check_distinct"]

DTYPES = ("float16", "bfloat16", "float32", "float64")


def arrival(state: AccumulatorState, grad: Any, cast: bool) -> Arrival:
    """Converts and checks one gradient: dtype and the constructor's shape."""
    if isinstance(grad, IndexedSlices):
        raise NotImplementedError("IndexedSlices (sparse gradients) are not implemented yet")
    if isinstance(grad, PerReplica):
        if grad.devices != state.devices:
            raise ValueError(f"the gradient lies on {grad.devices}, the sums on {state.devices}")
        parts = tuple(enumerate(grad.buffers))
        kind = grad.kind
    else:
        kind = kind_of(grad)
        parts = (_placed(state, grad),)
    for _, buffer in parts:
        if is_array(grad) or isinstance(grad, PerReplica):
            _check_dtype(state, buffer, cast)
        if state.shape is not None and not compatible(buffer.shape, state.shape):
            raise ValueError(f"Shapes {buffer.shape} and {state.shape} are incompatible")
        if buffer.shape != parts[0][1].shape:
            raise ValueError(f"replicas differ in shape: {buffer.shape} and {parts[0][1].shape}")
    return Arrival(state, parts, kind)


def _placed(state: AccumulatorState, grad: Any) -> tuple[int, Buffer]:
    """The device whose sum a gradient goes to: where it lies, else the first."""
    index = current_replica() or 0
    home = state.devices[0].mesh.devices
    device = home[index] if index < len(home) else state.devices[0]
    buffer = to_buffer(grad, device, dtype=state.dtype)
    place = state.devices.index(buffer.device) if buffer.device in state.devices else 0
    return place, buffer


def _check_dtype(state: AccumulatorState, buffer: Buffer, cast: bool) -> None:
    if buffer.dtype == state.dtype:
        return
    if not cast:
        raise ValueError(
            f"the gradient is {buffer.dtype}, the accumulator {state.dtype}; cast=True converts"
        )
    if buffer.dtype.name not in DTYPES:
        raise ValueError(f"a gradient of {buffer.dtype} is not converted to {state.dtype}")


def check_distinct(states: Sequence[AccumulatorState]) -> None:
    """Raises ``ValueError`` if there is none, or one twice."""
    if not states:
        raise ValueError("accumulators is empty")
    if len(set(states)) != len(states):
        raise ValueError("an accumulator is named twice")


def as_step(name: str, step: int | Variable) -> int:
    """An integer, or what a Variable holds; anything else is a ``TypeError``."""
    if isinstance(step, Variable):
        if step.shape or step.dtype.kind not in "iu":
            raise TypeError(f"{name}={step!r} must hold one integer")
        return int(step)
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"{name}={step!r} must be an integer or a Variable") from None


def as_shape(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """A shape with None for open extents; a negative one is a ``ValueError``."""
    wanted = tuple(None if extent is None else operator.index(extent) for extent in shape)
    if any(extent is not None and extent < 0 for extent in wanted):
        raise ValueError(f"shape={tuple(shape)!r} has a negative extent")
    return wanted
