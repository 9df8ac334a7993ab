"""Validates arguments of accumulators before anything changes; converts gradients.

Errors that TensorFlow also raises have TensorFlow's wording.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gradreduce.arrays.convert import PLAIN, is_array, kind_of, numbers, shape_and_dtype, to_buffer
from gradreduce.arrays.distributed import Part, PerReplica, buffer_of
from gradreduce.arrays.indexed_slices import IndexedSlices, as_slices
from gradreduce.arrays.replica_context import current_device, current_replica
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DType, as_index, is_number, names_of
from gradreduce.errors import DeviceMismatchError, InvalidArgumentError, brief
from gradreduce.sums.slices import concatenate_slices
from gradreduce.weights import ONE, as_weight, sum_weights

from .state import AccumulatorState, Addend, PendingGradient

DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Default(int):
    """A default value that is distinguishable from the same number passed explicitly."""


DEFAULT_STEP = _Default(0)  # default of ``local_step``, as in TensorFlow


def as_weights(weight: Any) -> float | tuple[float, ...]:
    """Validates a weight, or a list with one for each replica.

    Raises:
        TypeError: a weight is not a number on the host.
        ValueError: it is negative, infinite or NaN.
    """
    if not isinstance(weight, list | tuple):
        return as_weight("weight", weight)
    return tuple([as_weight(f"weight[{index}]", each) for index, each in enumerate(weight)])


def pending_gradient(
    state: AccumulatorState, grad: Any, cast: bool, weight: Any = 1
) -> PendingGradient:
    """Checks the gradient of each replica, and converts it for the accumulator's storage.

    Args:
        state: the accumulator.
        grad: the argument of a caller.
        cast: whether other float dtypes are converted.
        weight: from ``as_weights``; a gradient with weight 0 is not read.

    Raises:
        TypeError: it is not an array or, for a sparse accumulator, not IndexedSlices.
        ValueError: it has another dtype and ``cast`` is False; its shape does not fit; or the mesh
            has no device for the enclosing ``gr.replica``.
        InvalidArgumentError: rows do not fit the accumulator's shape.
        DeviceMismatchError: it is on another mesh.
    """
    if weight != 1:
        return _weighted_gradient(state, grad, cast, weight)
    grad, storage = grad if type(grad) in PLAIN else as_slices(grad), state.storage
    checked = [storage.validate(state, each, cast) for each in _replicas_of(state, grad)]
    if cast:
        _rehearse_casts(state, checked)
    parts = tuple([storage.to_addend(state, each) for each in checked])
    kind = grad.kind if isinstance(grad, IndexedSlices | PerReplica) else kind_of(grad)
    return PendingGradient(state, parts, kind, len(parts))


def _weighted_gradient(
    state: AccumulatorState, grad: Any, cast: bool, weight: float | tuple[float, ...]
) -> PendingGradient:
    """Does what ``pending_gradient`` does, for weights of which one is not 1."""
    several = isinstance(grad, PerReplica)
    count = len(grad) if several else 1
    weights = weight if isinstance(weight, tuple) else (weight,) * count
    if len(weights) != count:
        raise ValueError(
            f"weight has {len(weights)} entries; expected {count}, one per replica of the gradient"
        )
    excess = sum_weights(weights) - count * ONE
    if not any(weights):
        return PendingGradient(state, (), "native", count, excess)
    grad = as_slices(grad)
    kept = [index for index, each in enumerate(weights) if each]
    replicas = _replicas_of(state, grad, kept)
    checked = [state.storage.validate(state, replicas[index], cast) for index in kept]
    if cast:
        _rehearse_casts(state, checked)
    parts = tuple(
        [
            state.storage.to_addend(state, each)._replace(weight=weights[index])
            for index, each in zip(kept, checked, strict=True)
        ]
    )
    for dtype in {part.values.dtype for part in parts}:
        state.storage.rehearse(state, dtype, 2)
    kind = grad.kind if isinstance(grad, IndexedSlices | PerReplica) else kind_of(grad)
    return PendingGradient(state, parts, kind, count, excess)


def _rehearse_casts(state: AccumulatorState, checked: Sequence[Any]) -> None:
    """Compiles the kernels that add validated gradients of other dtypes."""
    rows = [each.values if isinstance(each, IndexedSlices) else each for each in checked]
    dtypes = {shape_and_dtype(each)[1] for each in rows if is_array(each)}
    for dtype in dtypes - {state.dtype}:
        state.storage.rehearse(state, dtype)


def parts_to_add(state: AccumulatorState, parts: Sequence[Part]) -> PendingGradient:
    """Returns a gradient that needs no check: a part of the dtype and shape on each device."""
    if state.storage.is_sparse:
        addends = [state.storage.to_addend(state, part) for part in parts]
    else:
        buffers = map(buffer_of, parts)
        addends = [Addend(index, buffer, buffer.shape) for index, buffer in enumerate(buffers)]
    return PendingGradient(state, tuple(addends), "buffer", len(addends))


def terms_to_add(state: AccumulatorState, replicas: Sequence[Sequence[Part]]) -> PendingGradient:
    """Returns one gradient for each replica, the sum of its terms, of the dtype and shape."""
    if state.storage.is_sparse:
        each_replica: Sequence[Any] = replicas
        rows = [
            terms[0] if len(terms) == 1 else concatenate_slices(terms, device)
            for terms, device in zip(each_replica, state.devices, strict=True)
        ]
        return parts_to_add(state, rows)
    addends = [
        Addend(index, buffer, buffer.shape)
        for index, terms in enumerate(replicas)
        for buffer in map(buffer_of, terms)
    ]
    return PendingGradient(state, tuple(addends), "buffer", len(replicas))


def num_gradients(state: AccumulatorState, grad: Any, cast: bool, weight: Any = 1) -> int:
    """Counts gradients that will be dropped; checks them without converting."""
    if weight != 1:
        return _weighted_gradient(state, grad, cast, weight).num_gradients
    replicas = _replicas_of(state, as_slices(grad))
    for each in replicas:
        state.storage.validate(state, each, cast)
        rows = each.values if isinstance(each, IndexedSlices) else each
        if isinstance(rows, Buffer):
            to_buffer(rows, state.devices[0])  # raises for another mesh
    return len(replicas)


def _replicas_of(
    state: AccumulatorState, grad: Any, kept: Sequence[int] | None = None
) -> Sequence[Any]:
    """Returns the gradient of each replica; checks their mesh, and the shapes of dense ones.

    Args:
        state: the accumulator.
        grad: the gradient.
        kept: the indices of the replicas to check. Default: all.
    """
    if not isinstance(grad, PerReplica):
        return (grad,)
    if grad.devices[0].mesh_state is not state.mesh_state:
        raise DeviceMismatchError(
            f"the gradient is on another mesh than the accumulator, which is on "
            f"{names_of(state.devices)}; make the PerReplica on the mesh of the accumulator"
        )
    grad._discard_copies()
    parts: Sequence[Any] = grad.parts
    first = kept[0] if kept else 0
    for replica in range(len(parts)) if kept is None else kept:
        part = parts[replica]
        if part.shape != parts[first].shape and not grad.is_sparse:
            raise ValueError(
                f"replicas differ in shape: replica {replica} has shape {list(part.shape)}, "
                f"replica {first} has {list(parts[first].shape)}"
            )
    return parts


def to_sum_device(state: AccumulatorState, grad: Any) -> tuple[int, Buffer]:
    """Returns the index of the device that adds a gradient, and the gradient's Buffer.

    The device is the gradient's own if the accumulator uses it, otherwise the accumulator's first.
    A host array is uploaded to the device of the enclosing ``gr.replica`` if the accumulator uses
    it, otherwise to the first.

    Raises:
        ValueError: the mesh has no device for the enclosing ``gr.replica``.
    """
    first = state.devices[0]
    named = first if current_replica() is None else current_device(first.mesh)
    buffer = to_buffer(grad, named if named in state.devices else first, dtype=state.dtype)
    return state.devices.index(buffer.device) if buffer.device in state.devices else 0, buffer


def check_dtype(state: AccumulatorState, dtype: DType, cast: bool) -> None:
    """Raises ``ValueError`` if a gradient has another dtype that ``cast`` may not convert."""
    if dtype == state.dtype:
        return
    converts = dtype.name in DTYPES and dtype.isnative
    if not cast:
        hint = "; pass cast=True to convert it" if converts else ""
        raise ValueError(f"the gradient is {dtype}, the accumulator is {state.dtype}{hint}")
    if not converts:
        raise ValueError(
            f"cast=True cannot convert a gradient of {dtype} to {state.dtype}; only floats"
        )


def as_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Validates a timeout: seconds, at least 0, or None for no limit."""
    if timeout is None:
        return None
    try:
        limited = float(min(max(timeout, 0.0), threading.TIMEOUT_MAX))
    except (TypeError, ValueError):  # ValueError: an array of several numbers
        raise TypeError(f"{name}={brief(timeout)} must be a number of seconds or None") from None
    if timeout != timeout:
        raise ValueError(f"{name}=nan must be a number of seconds or None")
    return limited


def as_required(num_required: int | Variable) -> int:
    """Validates ``num_required``; downloads the value of a Variable.

    Raises:
        TypeError: it is neither an integer nor a Variable.
        InvalidArgumentError: it is less than 1.
    """
    required = _as_integer("num_required", num_required)
    if required < 1:
        raise InvalidArgumentError(f"Argument num_required must be positive, but was {required}")
    return required


def as_step(name: str, step: int | Variable) -> int:
    """Validates a step; downloads the value of a Variable.

    Raises:
        TypeError: it is neither an integer nor a Variable.
        InvalidArgumentError: it does not fit in int64, TensorFlow's type of steps.
    """
    value = _as_integer(name, step)
    if not -(2**63) <= value < 2**63:
        raise InvalidArgumentError(f"{name}={value} does not fit in int64")
    return value


def _as_integer(name: str, number: int | Variable) -> int:
    if isinstance(number, Variable):
        if number.shape or number.dtype.kind not in "iu":
            raise TypeError(f"{name}={brief(number)} must hold one integer")
        return int(number)
    try:
        return as_index(number)
    except TypeError:
        raise TypeError(f"{name}={brief(number)} must be an integer or a Variable") from None


def as_rows(
    values: Any, indices: Any, shape: Sequence[int] | None, dtype: DType, weight: Any
) -> IndexedSlices | None:
    """Makes IndexedSlices; numbers and nested lists get the accumulator's dtype.

    Returns None if the weight is 0, because then they are not read.
    """
    if is_number(weight) and weight == 0:
        return None
    if kind_of(values) == "native" and not is_array(values):
        values = numbers(values, dtype)
    return IndexedSlices(values, indices, shape)


def check_sparse_mean(sparse_mean: str, reduction_type: str) -> None:
    """Raises ``ValueError`` if ``sparse_mean`` is unknown, or has no effect on a SUM."""
    if not isinstance(sparse_mean, str) or sparse_mean not in ("per_row", "per_gradient"):
        raise ValueError(f'sparse_mean {brief(sparse_mean)} not in: "per_row", "per_gradient"')
    if sparse_mean != "per_row" and reduction_type == "SUM":
        raise ValueError(
            f"sparse_mean={brief(sparse_mean)} is only for reduction_type='MEAN'; a SUM is not "
            "divided"
        )
