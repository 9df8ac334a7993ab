"""Validates gradients, steps and shapes of accumulators before anything changes.

Errors that TensorFlow also raises have TensorFlow's wording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gradreduce.arrays.convert import is_array, kind_of, numbers, shape_and_dtype, to_buffer
from gradreduce.arrays.distributed import PerReplica
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices, densified
from gradreduce.arrays.replica_context import current_device, current_replica
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DType, as_index, compatible
from gradreduce.errors import DeviceMismatchError, InvalidArgumentError, about, brief, listed
from gradreduce.ops import plan_segments
from gradreduce.reduce.aggregation import known_shape, with_dense

from .dense_storage import prepare_parts
from .sparse_storage import prepare_gradient
from .state import AccumulatorState, PendingGradient, SparseGradient

T = TypeVar("T")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Default(int):
    """A default value that is distinguishable from the same number passed explicitly."""


DEFAULT_STEP = _Default(0)  # default of ``local_step``, as in TensorFlow
_OF_ROWS = (IndexedSlices, PerReplica)  # types that may hold sparse gradients


def pending_gradient(state: AccumulatorState, grad: Any, cast: bool) -> PendingGradient:
    """Converts one dense gradient, and checks its dtype and shape."""
    if isinstance(grad, _OF_ROWS):
        kind, grad = grad.kind, _as_dense(state, grad, cast)
    else:
        kind = kind_of(grad)
    if isinstance(grad, PerReplica):
        parts = _replicas(state, grad, cast)
    else:
        if is_array(grad) and kind in ("native", "buffer"):
            check_dtype(state, grad.dtype, cast)
        parts = (to_sum_device(state, grad),)
        if is_array(grad):  # the dtype of another library's array is known after conversion
            check_dtype(state, parts[0][1].dtype, cast)
    for _, buffer in parts:
        _check_shape(state, buffer.shape)
    made = PendingGradient(state, parts, kind)
    together = len(parts) > 1 and len({index for index, _ in parts}) < len(parts)
    if together or any([buffer.dtype != state.dtype for _, buffer in parts]):
        prepare_parts(made)  # kernels that the constructor did not compile
    return made


def _as_dense(state: AccumulatorState, grad: Any, cast: bool) -> Any:
    """Converts IndexedSlices, also in a PerReplica, to dense; returns others unchanged."""
    if isinstance(grad, IndexedSlices):
        whole = _with_shape(state, grad, cast)
        _, rows = to_sum_device(state, whole.values)
        return densified([IndexedSlices.of(rows, whole.indices, whole.dense_shape)])[0]
    if isinstance(grad, PerReplica) and grad.is_sparse:
        slices = [
            _with_shape(state, part, cast) if isinstance(part, IndexedSlices) else part
            for part in grad.parts
        ]
        return PerReplica.of(with_dense(slices), grad.kind)
    return grad


def _with_shape(state: AccumulatorState, slices: IndexedSlices, cast: bool) -> IndexedSlices:
    """Checks slices; without a ``dense_shape`` they get the accumulator's, if known."""
    check_dtype(state, slices.dtype, cast)
    shape = state.shape
    if slices.dense_shape is None and shape and None not in shape:
        slices = IndexedSlices(slices.values, slices.indices, [extent or 0 for extent in shape])
    _check_shape(state, known_shape(slices, alone=True))
    return slices


def num_gradients(state: AccumulatorState, grad: Any, cast: bool) -> int:
    """Counts dense gradients that will be dropped; checks them without converting.

    Returns:
        The number of gradients in ``grad``.
    """
    if isinstance(grad, IndexedSlices):
        _with_shape(state, grad, cast)
        return 1
    if isinstance(grad, PerReplica):
        if not grad.is_sparse:
            return len(_replicas(state, grad, cast))  # already Buffers
        return sum(num_gradients(state, part, cast) for part in grad.parts)
    kind = kind_of(grad)
    if kind == "buffer":
        to_buffer(grad, state.devices[0])  # raises for another mesh
    if not is_array(grad):
        shape = numbers(grad, state.dtype).shape
    elif kind in ("native", "buffer"):
        shape = grad.shape
        check_dtype(state, grad.dtype, cast)
    else:
        shape, dtype = shape_and_dtype(grad)
        check_dtype(state, dtype, cast)
    _check_shape(state, shape)
    return 1


def _replicas(
    state: AccumulatorState, grad: PerReplica, cast: bool
) -> tuple[tuple[int, Buffer], ...]:
    """The gradient of each replica with its device index; checks dtypes and shapes."""
    if grad.devices[0].mesh_state is not state.devices[0].mesh_state:
        devices = listed(device.name for device in state.devices)
        raise DeviceMismatchError(
            f"the gradient is on another mesh than the accumulator, which is on {devices}"
        )
    grad._discard_copies()
    first = grad.buffers[0].shape
    for replica, buffer in enumerate(grad.buffers):
        check_dtype(state, buffer.dtype, cast)
        if buffer.shape != first:
            raise ValueError(
                f"replicas differ in shape: replica {replica} has shape {list(buffer.shape)}, "
                f"replica 0 has {list(first)}"
            )
    return tuple([(_index_of_device(state, buffer), buffer) for buffer in grad.buffers])


def to_sum_device(state: AccumulatorState, grad: Any) -> tuple[int, Buffer]:
    """The index of the device whose sum a gradient is added to, and its Buffer.

    That is the gradient's own device, if the accumulator uses it, else the first. A host array is
    uploaded to the device of the enclosing ``gr.replica``, else to the first.

    Raises:
        ValueError: the mesh has no device for the enclosing ``gr.replica``.
    """
    device = state.devices[0]
    if current_replica() is not None:
        named = current_device(device.mesh)
        device = named if named in state.devices else device
    buffer = to_buffer(grad, device, dtype=state.dtype)
    return _index_of_device(state, buffer), buffer


def _index_of_device(state: AccumulatorState, buffer: Buffer) -> int:
    return state.devices.index(buffer.device) if buffer.device in state.devices else 0


def _check_shape(state: AccumulatorState, shape: tuple[int, ...]) -> None:
    """Checks a shape against the constructor's."""
    wanted = state.shape
    if wanted is not None and shape != wanted and not compatible(shape, wanted):
        raise ValueError(
            f"Shapes {shape} and {wanted} are incompatible: the gradient's and the accumulator's"
        )


def check_dtype(state: AccumulatorState, dtype: DType, cast: bool) -> None:
    """Raises ``ValueError`` for another dtype, or with ``cast`` for a non-float dtype."""
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


def for_each(
    function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], name_of: Callable[[int], str]
) -> list[T]:
    """Calls the function with each tuple of arguments; errors begin with its name."""
    made = []
    for index, each in enumerate(arguments):
        try:
            made.append(function(*each))
        except (TypeError, ValueError) as error:
            raise about(name_of(index), error) from None
    return made


def check_distinct(states: Sequence[AccumulatorState]) -> None:
    """Checks that one call can use all the accumulators.

    Raises:
        ValueError: there are none, or one is passed twice.
        DeviceMismatchError: they are on devices of different meshes.
    """
    if not states:
        raise ValueError("accumulators is empty; pass at least one")
    if len(states) == 1:
        return
    seen: dict[AccumulatorState, int] = {}
    for index, state in enumerate(states):
        if seen.setdefault(state, index) != index:
            raise ValueError(
                f"accumulators[{index}] is the same as accumulators[{seen[state]}]; pass each at "
                "most once"
            )
    for index, state in enumerate(states):
        if state.devices[0].mesh_state is not states[0].devices[0].mesh_state:
            raise DeviceMismatchError(
                f"accumulators[{index}] is on another mesh than accumulators[0]; make one call "
                "for each mesh"
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
    found = _as_integer(name, step)
    if not -(2**63) <= found < 2**63:
        raise InvalidArgumentError(f"{name}={found} does not fit in int64")
    return found


def _as_integer(name: str, number: int | Variable) -> int:
    if isinstance(number, Variable):
        if number.shape or number.dtype.kind not in "iu":
            raise TypeError(f"{name}={brief(number)} must hold one integer")
        return int(number)
    try:
        return as_index(number)
    except TypeError:
        raise TypeError(f"{name}={brief(number)} must be an integer or a Variable") from None


def as_shape(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """Validates a shape with None for unknown extents."""
    try:
        wanted = tuple(None if extent is None else as_index(extent) for extent in shape)
    except TypeError:
        raise TypeError(f"shape={brief(shape)} must be a list of integers and None") from None
    if any(extent is not None and extent < 0 for extent in wanted):
        raise ValueError(f"shape={brief(tuple(shape))} has a negative extent")
    return wanted


def pending_sparse_gradient(state: AccumulatorState, grad: Any, cast: bool) -> PendingGradient:
    """Checks and converts one sparse gradient, or one for each replica.

    Raises:
        TypeError: it is neither IndexedSlices nor a ``PerReplica`` of them.
        ValueError: it has another dtype, without ``cast``.
        InvalidArgumentError: its shape does not fit the accumulator's, or an index is too large.
    """
    parts = []
    for slices in _checked(state, grad, cast):
        index, rows = to_sum_device(state, slices.values)
        parts.append((index, _gradient(state, slices, rows)))
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in parts):
        if dtype != state.dtype:  # cast: its kernels may not be compiled
            prepare_gradient(state, dtype)
    return PendingGradient(state, tuple(parts), grad.kind)


def num_sparse_gradients(state: AccumulatorState, grad: Any, cast: bool) -> int:
    """Counts sparse gradients that will be dropped; checks them without converting."""
    parts = _checked(state, grad, cast)
    for slices in parts:
        if isinstance(slices.values, Buffer):
            to_buffer(slices.values, state.devices[0])  # raises for another mesh
    return len(parts)


def _checked(state: AccumulatorState, grad: Any, cast: bool) -> list[IndexedSlices]:
    """The IndexedSlices of each gradient, checked."""
    parts: Sequence[Any] = grad.parts if isinstance(grad, PerReplica) else [grad]
    for slices in parts:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"a SparseConditionalAccumulator expects IndexedSlices, got {type(slices).__name__}"
            )
        check_dtype(state, slices.dtype, cast)
        _check_sparse_shape(state, slices)
    return list(parts)


def _gradient(state: AccumulatorState, slices: IndexedSlices, rows: Buffer) -> SparseGradient:
    """Makes a SparseGradient; its first extent is the accumulator's, if known."""
    first = slices.dense_shape[0] if slices.dense_shape is not None else UNKNOWN
    if state.shape and state.shape[0] is not None:
        first = state.shape[0]
    return SparseGradient(rows, plan_segments(slices.indices), (first, *rows.shape[1:]))


def _check_sparse_shape(state: AccumulatorState, slices: IndexedSlices) -> None:
    """Checks slices against the accumulator's shape, which may have fewer dimensions."""
    wanted = state.shape
    if not wanted:
        return
    dense_shape = slices.dense_shape
    if dense_shape is not None:
        _check_extents(
            "shape",
            wanted,
            (None if dense_shape[0] == UNKNOWN else dense_shape[0], *dense_shape[1:]),
        )
    if wanted[0] is not None and len(slices.indices):
        last = int(slices.indices.max())
        if last >= wanted[0]:
            raise InvalidArgumentError(
                f"index of slice {int(slices.indices.argmax())} exceeded limits of shape; index is "
                f"{last} exceeded {wanted[0]}"
            )
    rows, _ = shape_and_dtype(slices.values)
    _check_extents("values", wanted, (None, *rows[1:]))


def _check_extents(
    what: str, wanted: tuple[int | None, ...], shape: tuple[int | None, ...]
) -> None:
    """Raises ``InvalidArgumentError`` if known extents differ or dimensions are missing."""
    if len(shape) < len(wanted):
        raise InvalidArgumentError(f"expected {what} rank at least {len(wanted)}, got {len(shape)}")
    for index, (extent, known) in enumerate(zip(shape, wanted, strict=False)):
        if extent is not None and known is not None and extent != known:
            raise InvalidArgumentError(f"expected {what} dim {index} to be {known}, got {extent}")


def check_sum_shape(pending_gradient: PendingGradient) -> None:
    """Checks sparse gradients against the sum's shape; the lock must be held.

    Raises:
        InvalidArgumentError: the shape of the rows or ``dense_shape`` differs, or an index is not
            below the first extent of the sum.
    """
    state = pending_gradient.state
    expected = (
        pending_gradient.shape if not state.count or state.sum_shape is None else state.sum_shape
    )
    for _, gradient in pending_gradient.parts:
        assert isinstance(gradient, SparseGradient)
        first, *row = gradient.dense_shape
        known = (None if UNKNOWN in (first, expected[0]) else expected[0], *expected[1:])
        if not compatible((first, *row), known):
            raise InvalidArgumentError(
                f"Shape mismatch: expected {list(expected)}, got {[first, *row]}"
            )
        indices = gradient.segments.indices  # unique and ascending, not as the caller passed them
        if expected[0] != UNKNOWN and len(indices) and indices[-1] >= expected[0]:
            raise InvalidArgumentError(
                f"index {indices[-1]} is not below dense_shape[0] = {expected[0]} of the first "
                "gradient in the sum"
            )
