"""Saves the state of an accumulator to host memory, and validates and loads it.

The state consists of integers, strings, None, lists of integers or None, and arrays of float32 or
float64: any checkpoint format can hold it and any backend can load it. Loading validates all keys
before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import as_result_kind, is_array
from gradreduce.arrays.convert_gpu import Kind
from gradreduce.arrays.indexed_slices import UNKNOWN
from gradreduce.device import Device, as_index
from gradreduce.errors import CollectiveError, about, brief

from .state import AccumulatorState
from .take_queue import complete_ready
from .validate import as_shape, as_step

KEYS = (
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


def saved_state(state: AccumulatorState, deadline: float | None) -> dict[str, Any]:
    """Returns a snapshot of the state; see ``ConditionalAccumulatorBase.state_dict``.

    Copies are queued under the lock, because later applies add in place; the host waits for them
    after releasing it.

    Args:
        state: the accumulator.
        deadline: seconds from ``as_deadline``, for all downloads together.
    """
    end = snapshots.end_of(deadline)
    with state.lock:
        state.check_open()
        state.check_devices()
        generation = state.mesh_state.generation
        made: dict[str, Any] = {
            "format": state.storage.format,
            "dtype": str(state.dtype),
            "reduction_type": state.reduction_type,
            "shape": None if state.shape is None else list(state.shape),
            "global_step": state.step,
            "num_accumulated": state.count,
            "num_dropped": state.num_dropped,
            "sum_shape": None if state.sum_shape is None else list(state.sum_shape),
            "kind": state.kind if state.count else None,
        }
        downloads = [None if total is None else state.storage.save(total) for total in state.totals]
    made["partial_sums"] = [None if download is None else download(end) for download in downloads]
    if state.mesh_state.has_failed(generation):  # and was reset before a download could fail
        raise CollectiveError(
            "the mesh failed while the state of an accumulator was saved; load an older checkpoint"
        )
    return made


def ready_state(state: AccumulatorState, saved: Mapping[str, Any]) -> Callable[[], None]:
    """Validates a state and uploads it; the returned function loads it.

    It replaces everything under the lock; see ``ConditionalAccumulatorBase.load_state_dict``.
    """
    generation = state.mesh_state.generation
    attributes, uploads = _checked(state, saved)
    with state.lock:
        state.check_open()
    totals = [
        None if upload is None else upload(device)
        for upload, device in zip(uploads, state.devices, strict=True)
    ]

    def load() -> None:
        with state.lock:
            state.check_open()
            state.check_devices()
            if state.mesh_state.has_failed(generation):  # then reset: uploads may be incomplete
                raise CollectiveError(
                    "the mesh failed while the state of an accumulator was loaded; load it again"
                )
            state.update(**attributes, totals=totals)
            complete_ready([state], held=True)
        complete_ready([state])

    return load


def _checked(
    state: AccumulatorState, saved: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Callable[[Device], Any] | None]]:
    """Validates a saved state.

    Returns:
        Attributes of ``AccumulatorState``; and for each device a function that uploads its partial
        sum, or None without one.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value has a wrong type.
        ValueError: a value is out of range, or contradicts the accumulator or another value.
    """
    snapshots.check_keys("state", saved, KEYS)
    snapshots.check_entry(saved, "format", state.storage.format)
    values = {key: snapshots.plain(saved[key]) for key in KEYS}
    definition = (
        ("dtype", _text, str(state.dtype)),
        ("reduction_type", _text, state.reduction_type),
        ("shape", _shape, state.shape),
    )
    for key, convert, wanted in definition:
        found = convert(key, values[key])
        if found != wanted:
            raise ValueError(f"state[{key!r}] is {brief(found)}; the accumulator has {wanted!r}")
    step = as_step("state['global_step']", integer("global_step", values["global_step"]))
    count, num_dropped = (
        integer(key, values[key], least=0) for key in ("num_accumulated", "num_dropped")
    )
    sum_shape = _sum_shape(state, values["sum_shape"], count)
    attributes = {
        "step": step,
        "count": count,
        "num_dropped": num_dropped,
        "sum_shape": sum_shape,
        "kind": _kind(state.devices[0], values["kind"], count),
    }
    return attributes, _uploads(state, saved["partial_sums"], count, sum_shape or ())


def _sum_shape(state: AccumulatorState, value: Any, count: int) -> tuple[int, ...] | None:
    """Validates the shape of the sums, whose first extent may be -1; None without any."""
    if isinstance(value, list | tuple) or is_array(value):
        value = [None if index == 0 and extent == UNKNOWN else extent
                 for index, extent in enumerate(value)]  # fmt: skip
    shape = _shape("sum_shape", value)
    _check_presence("sum_shape", shape is not None, count)
    if shape is None:
        return None
    known = tuple(UNKNOWN if extent is None else extent for extent in shape)
    if not state.storage.fits(known, state.shape):
        raise ValueError(
            f"state['sum_shape'] is {shape}, which does not fit the accumulator's shape "
            f"{state.shape}"
        )
    return known


def _kind(device: Device, value: Any, count: int) -> Kind:
    """Validates the array type that the next take returns."""
    _check_presence("kind", value is not None, count)
    if not count:
        return "native"
    kind = _text("kind", value)
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


def _uploads(
    state: AccumulatorState, saved: Any, count: int, sum_shape: tuple[int, ...]
) -> list[Callable[[Device], Any] | None]:
    """Validates the partial sum of each device, and returns functions that upload them."""
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
    uploads: list[Callable[[Device], Any] | None] = []
    for index, each in enumerate(saved):
        name = f"state['partial_sums'][{index}]"
        upload = None
        if each is not None:
            upload = state.storage.load(name, each, state.dtype, sum_shape, count)
        uploads.append(upload)
    return uploads


def _check_presence(key: str, present: bool, count: int) -> None:
    if present != (count > 0):
        what = "must be empty" if present else "is missing"
        raise ValueError(f"state[{key!r}] {what}, because state['num_accumulated']={count}")


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"state[{key!r}]={brief(value)} must be a string")
    return value


def integer(key: str, value: Any, least: int | None = None) -> int:
    """Validates an integer of a state."""
    try:
        number = as_index(value)
    except TypeError:
        raise TypeError(f"state[{key!r}]={brief(value)} must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"state[{key!r}]={number} must not be negative")
    return number


def _shape(key: str, value: Any) -> tuple[int | None, ...] | None:
    if value is None:
        return None
    try:
        if not isinstance(value, list | tuple) and not is_array(value):
            raise TypeError
        return as_shape(tuple(value))
    except TypeError:
        raise TypeError(
            f"state[{key!r}]={brief(value)} must be a list of extents or None"
        ) from None
    except ValueError as error:
        raise about(f"state[{key!r}]", error) from None
