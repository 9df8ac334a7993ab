"""Saves the state of an accumulator to host memory, and validates and loads it.

The state consists of integers, strings, None, lists of integers or None, and arrays of float32 or
float64: any checkpoint format can hold it and any backend can load it. Loading validates all keys
before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import as_result_kind, host_array, is_array
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import UNKNOWN, IndexedSlices
from gradreduce.device import Buffer, Device, DType, accumulate_dtype, as_index, compatible
from gradreduce.errors import CollectiveError, about, brief
from gradreduce.ops import RowIndex, joined_indices

from .state import AccumulatorState, SparseSum
from .take_queue import complete_multi, complete_ready
from .validate import as_shape, as_step

_Shape = tuple[int | None, ...] | None
_KEYS = (
    "format",
    "dtype",
    "reduction_type",
    "shape",
    "global_step",
    "num_accumulated",
    "num_dropped",
    "sum_shape",
    "kind",
    "partial_sums",
)


@dataclass(frozen=True)
class CheckedState:
    """A validated state, in the types of ``AccumulatorState``.

    Attributes:
        step: as in ``AccumulatorState``, like the next four.
        count: see there.
        num_dropped: see there.
        sum_shape: see there.
        kind: see there.
        hosts: for each device the host data of its partial sum, for ``uploaded``, or None.
    """

    step: int
    count: int
    num_dropped: int
    sum_shape: tuple[int, ...] | None
    kind: Kind
    hosts: tuple[Any, ...]


def checked_state(state: AccumulatorState, saved: Mapping[str, Any]) -> CheckedState:
    """Validates ``given`` and converts it to the types of ``AccumulatorState``.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value has a wrong type.
        ValueError: a value is out of range, or contradicts the accumulator or another value.
    """
    snapshots.check_keys("state", saved, _KEYS)
    snapshots.check_entry(saved, "format", sums_of(state).format)
    definition = {
        "dtype": str(state.dtype),
        "reduction_type": state.reduction_type,
        "shape": state.shape,
    }
    for key, wanted in definition.items():
        found = _shape(key, saved[key]) if key == "shape" else _text(key, saved[key])
        if found != wanted:
            raise ValueError(f"state[{key!r}] is {brief(found)}; the accumulator has {wanted!r}")
    step, count, num_dropped = (
        _integer(key, saved[key]) for key in ("global_step", "num_accumulated", "num_dropped")
    )
    for key, number in (("num_accumulated", count), ("num_dropped", num_dropped)):
        if number < 0:
            raise ValueError(f"state[{key!r}]={number} must not be negative")
    as_step("state['global_step']", step)
    sum_shape = _sum_shape(state, saved["sum_shape"], count)
    kind = _kind(state.devices[0], saved["kind"], count)
    hosts = _hosts(state, saved["partial_sums"], count, sum_shape)
    return CheckedState(step, count, num_dropped, sum_shape, kind, hosts)


def _sum_shape(state: AccumulatorState, saved: Any, count: int) -> tuple[int, ...] | None:
    """Validates the shape of the sums; None without any."""
    value = snapshots.plain(saved)
    if state.sparse and (isinstance(value, list | tuple) or is_array(value)):
        value = [None if index == 0 and extent == UNKNOWN else extent
                 for index, extent in enumerate(value)]  # fmt: skip
    shape = _shape("sum_shape", value)
    _check_presence("sum_shape", shape is not None, count)
    if shape is None:
        return None
    if not sums_of(state).fits(shape, state.shape):
        raise ValueError(
            f"state['sum_shape'] is {shape}, which does not fit the accumulator's shape "
            f"{state.shape}"
        )
    return tuple(UNKNOWN if extent is None else extent for extent in shape)


def _kind(device: Device, saved: Any, count: int) -> Kind:
    """Validates the array type that the next take returns."""
    _check_presence("kind", snapshots.plain(saved) is not None, count)
    if not count:
        return "native"
    kind = _text("kind", saved)
    if kind not in get_args(Kind):
        raise ValueError(f"state['kind']={brief(kind)} is not one of {get_args(Kind)}")
    if kind in ("cupy", "cuda") and device.mesh_state.backend == "sim":
        return "native"  # simulated devices return NumPy arrays
    if kind in ("torch", "jax", "coo"):
        try:
            as_result_kind("torch" if kind == "coo" else kind, "native")
        except ValueError as error:
            raise about("state['kind']", error) from None
    return kind  # type: ignore[return-value]  # one of the literals, checked above


def _hosts(
    state: AccumulatorState, saved: Any, count: int, sum_shape: tuple[int, ...] | None
) -> tuple[Any, ...]:
    """Validates the partial sum of each device; None where there is none."""
    if not isinstance(saved, list | tuple):
        raise TypeError(
            f"state['partial_sums'] is a {type(saved).__name__}; expected a list with an entry "
            "for each device"
        )
    if len(saved) != len(state.devices):
        raise ValueError(
            f"state['partial_sums'] has {len(saved)} entries; the accumulator is on "
            f"{len(state.devices)} devices"
        )
    filled = sum(each is not None for each in saved)
    _check_presence("partial_sums", filled > 0, count)
    if filled > count:
        raise ValueError(
            f"state['partial_sums'] has {filled} sums, but state['num_accumulated']={count}"
        )
    sums = sums_of(state)
    return tuple(
        None
        if each is None
        else sums.checked(
            f"state['partial_sums'][{index}]", each, state.dtype, sum_shape or (), count
        )
        for index, each in enumerate(saved)
    )


def _check_presence(key: str, present: bool, count: int) -> None:
    if present != (count > 0):
        what = "must be empty" if present else "is missing"
        raise ValueError(f"state[{key!r}] {what}, because state['num_accumulated']={count}")


def _text(key: str, value: Any) -> str:
    text = snapshots.plain(value)
    if not isinstance(text, str):
        raise TypeError(f"state[{key!r}]={brief(value)} must be a string")
    return text


def _integer(key: str, value: Any) -> int:
    try:
        return as_index(snapshots.plain(value))
    except TypeError:
        raise TypeError(f"state[{key!r}]={brief(value)} must be an integer") from None


def _shape(key: str, value: Any) -> _Shape:
    extents = snapshots.plain(value)
    if extents is None:
        return None
    try:
        if not isinstance(extents, list | tuple) and not is_array(extents):
            raise TypeError
        return as_shape(tuple(extents))
    except TypeError:
        raise TypeError(
            f"state[{key!r}]={brief(value)} must be a list of extents or None"
        ) from None
    except ValueError as error:
        raise about(f"state[{key!r}]", error) from None


class DenseSums:
    """Saves and loads a dense partial sum, which is one array.

    ``SparseSums`` has the same methods.

    Attributes:
        format: identifies the kind of accumulator and the version of the state's layout.
    """

    format = "gradreduce dense accumulator 1"

    copied = staticmethod(snapshots.copied)
    downloaded = staticmethod(snapshots.downloaded)

    @staticmethod
    def fits(shape: _Shape, wanted: _Shape) -> bool:
        """Whether a sum of ``shape`` fits an accumulator whose shape is ``wanted``."""
        if shape is None or None in shape:
            return False
        return wanted is None or compatible([extent or 0 for extent in shape], wanted)

    @staticmethod
    def checked(name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int) -> Any:
        """Validates a host array of ``shape`` in the accumulate dtype of ``dtype``."""
        return snapshots.checked_array(name, saved, shape, accumulate_dtype(dtype))

    @staticmethod
    def uploaded(device: Device, host: Any) -> Buffer:
        """Uploads the array into new memory, which later applies write."""
        return device.upload(host)


class SparseSums:
    """Saves and loads a sparse partial sum: three arrays, in the order of the indices."""

    format = "gradreduce sparse accumulator 1"
    _KEYS = ("indices", "num_touches", "values")

    @staticmethod
    def copied(total: SparseSum) -> SparseSum:
        """Queues a copy of the rows; the row index is immutable."""
        return SparseSum(total.slots, snapshots.copied(total.rows))

    @classmethod
    def downloaded(cls, copy: SparseSum, end: float | None) -> dict[str, Any]:
        """Downloads indices, touches of each and rows; waits for the device."""
        slots = copy.slots
        rows = snapshots.downloaded(copy.values, end)[slots.rows]
        return dict(zip(cls._KEYS, (slots.indices.copy(), slots.num_touches(), rows), strict=True))

    @classmethod
    def fits(cls, shape: _Shape, wanted: _Shape) -> bool:
        """As in ``DenseSums``; the first extent may be unknown, and there may be more."""
        if not shape or None in shape[1:] or len(shape) < len(wanted or ()):
            return False
        if not wanted:
            return True
        first = [UNKNOWN if extent is None else extent for extent in shape[: len(wanted)]]
        return compatible(first, wanted)

    @classmethod
    def checked(
        cls, name: str, saved: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> dict[str, Any]:
        """Validates the three arrays."""
        snapshots.check_keys(name, saved, cls._KEYS)
        values, acc_dtype = saved["values"], accumulate_dtype(dtype)
        try:
            slices = IndexedSlices(values, saved["indices"], shape)
            touches = joined_indices([host_array(saved["num_touches"])])
        except (TypeError, ValueError) as error:
            raise about(name, error) from None
        indices = slices.indices
        if slices.dtype != acc_dtype or not is_array(values):
            raise ValueError(f"{name}['values'] is {slices.dtype}; expected {acc_dtype}")
        if not (indices[1:] > indices[:-1]).all():
            raise ValueError(f"{name}['indices'] must be strictly ascending, got {indices}")
        if touches.dtype.kind not in "iu" or touches.shape != indices.shape:
            raise ValueError(
                f"{name}['num_touches'] must have one integer for each of {len(indices)} indices"
            )
        if len(indices) and not 1 <= touches.min() <= touches.max() <= count:
            raise ValueError(f"{name}['num_touches'] must be from 1 to {count}, got {touches}")
        found = (indices, touches.astype("int64"), host_array(values))
        return dict(zip(cls._KEYS, found, strict=True))

    @staticmethod
    def uploaded(device: Device, host: dict[str, Any]) -> SparseSum:
        """Uploads the rows into new memory without spare capacity."""
        slots = RowIndex.of(host["indices"], host["num_touches"])
        return SparseSum(slots, device.upload(host["values"]))


def sums_of(state: AccumulatorState) -> Any:
    """The class that saves and loads the partial sums of this accumulator."""
    return SparseSums if state.sparse else DenseSums


def saved_state(state: AccumulatorState, deadline: float | None) -> dict[str, Any]:
    """Returns a snapshot of the state; see ``ConditionalAccumulatorBase.state_dict``.

    Copies are queued under the lock, because later applies add in place; the host waits for them
    after releasing it.

    Args:
        state: the accumulator.
        deadline: seconds from ``as_deadline``, for all downloads together.
    """
    end = snapshots.end_of(deadline)
    sums = sums_of(state)
    mesh_state = state.devices[0].mesh_state
    with state.lock:
        state.check_open()
        state.check_devices()
        generation = mesh_state.generation
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
    made["partial_sums"] = [None if copy is None else sums.downloaded(copy, end) for copy in copies]
    if mesh_state.has_failed(generation):  # and was reset before a download could fail
        raise CollectiveError(
            "the mesh failed while the state of an accumulator was saved; load an older checkpoint"
        )
    return made


def load_state(state: AccumulatorState, saved: Mapping[str, Any]) -> None:
    """Validates and loads a state; see ``ConditionalAccumulatorBase.load_state_dict``.

    Checks, uploads, and then replaces everything under the lock: on error, nothing has changed.
    """
    mesh_state = state.devices[0].mesh_state
    generation = mesh_state.generation
    checked = checked_state(state, saved)
    sums = sums_of(state)
    totals = [
        None if host is None else sums.uploaded(device, host)
        for device, host in zip(state.devices, checked.hosts, strict=True)
    ]
    with state.lock:
        state.check_open()
        state.check_devices()
        if mesh_state.has_failed(generation):  # then reset: uploads may be incomplete
            raise CollectiveError(
                "the mesh failed while the state of an accumulator was loaded; load it again"
            )
        state.step = checked.step
        state.count = checked.count
        state.num_dropped = checked.num_dropped
        state.sum_shape = checked.sum_shape
        state.kind = checked.kind
        state.totals = totals
        incomplete = complete_ready([state])
    complete_multi(incomplete)
