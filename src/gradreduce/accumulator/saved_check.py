"""Whether a saved state may be loaded into an accumulator: each key, before anything changes.

Never allocates on a device and never takes a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from gradreduce.device import Device, as_index
from gradreduce.errors import about, brief, listed
from gradreduce.indexed_slices import UNKNOWN
from gradreduce.interop import Kind, as_result_kind, is_array

from .door import as_shape, as_step
from .saved_sums import sums_of
from .state import AccumulatorState

__all__ = ["CheckedState", "checked_state"]

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
    """What a given state says, all of it right.

    Attributes:
        step: as in ``AccumulatorState``, like the next four.
        count: see there.
        num_dropped: see there.
        sum_shape: see there.
        kind: see there.
        hosts: for each device what ``uploaded`` makes its partial sum of, or None.
    """

    step: int
    count: int
    num_dropped: int
    sum_shape: tuple[int, ...] | None
    kind: Kind
    hosts: tuple[Any, ...]


def checked_state(state: AccumulatorState, given: Mapping[str, Any]) -> CheckedState:
    """What ``given`` says, in the types of ``AccumulatorState``.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value of another type.
        ValueError: a value that is impossible, or does not fit the accumulator or another value.
    """
    _check_keys(state, given)
    definition = {
        "dtype": str(state.dtype),
        "reduction_type": state.reduction_type,
        "shape": state.shape,
    }
    for key, wanted in definition.items():
        found = _shape(key, given[key]) if key == "shape" else _text(key, given[key])
        if found != wanted:
            raise ValueError(f"state[{key!r}] is {brief(found)}, the accumulator's is {wanted!r}")
    step, count, num_dropped = (
        _integer(key, given[key]) for key in ("global_step", "num_accumulated", "num_dropped")
    )
    for key, number in (("num_accumulated", count), ("num_dropped", num_dropped)):
        if number < 0:
            raise ValueError(f"state[{key!r}]={number} is negative")
    as_step("state['global_step']", step)
    sum_shape = _sum_shape(state, given["sum_shape"], count)
    kind = _kind(state.devices[0], given["kind"], count)
    hosts = _hosts(state, given["partial_sums"], count, sum_shape)
    return CheckedState(step, count, num_dropped, sum_shape, kind, hosts)


def _check_keys(state: AccumulatorState, given: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"state is a {type(given).__name__}, not a dict from state_dict()")
    wanted = sums_of(state).format
    if "format" in given and _text("format", given["format"]) != wanted:  # its keys may be others
        raise ValueError(f"state['format'] is {brief(_plain(given['format']))}, not {wanted!r}")
    for what, keys in (
        ("lacks", [key for key in _KEYS if key not in given]),
        ("has unknown", [key for key in given if key not in _KEYS]),
    ):
        if keys:
            raise KeyError(f"state {what} {listed(map(repr, keys))}")


def _sum_shape(state: AccumulatorState, given: Any, count: int) -> tuple[int, ...] | None:
    """Of the sums: None without any, else what fits the constructor's shape."""
    value = _plain(given)
    if state.sparse and (isinstance(value, list | tuple) or is_array(value)):
        value = [None if place == 0 and extent == UNKNOWN else extent
                 for place, extent in enumerate(value)]  # fmt: skip
    shape = _shape("sum_shape", value)
    _check_presence("sum_shape", shape is not None, count)
    if shape is None:
        return None
    if not sums_of(state).fits(shape, state.shape):
        raise ValueError(
            f"state['sum_shape'] is {shape}, which does not fit the accumulator's {state.shape}"
        )
    return tuple(UNKNOWN if extent is None else extent for extent in shape)


def _kind(device: Device, given: Any, count: int) -> Kind:
    """Which array the next take hands out, as the devices can make it."""
    _check_presence("kind", _plain(given) is not None, count)
    if not count:
        return "native"
    kind = _text("kind", given)
    if kind not in get_args(Kind):
        raise ValueError(f"state['kind']={brief(kind)} is not one of {get_args(Kind)}")
    if kind in ("cupy", "cuda") and device.fabric.backend == "sim":
        return "native"  # CuPy's there: this is the same word for the one and the other
    if kind in ("torch", "jax", "coo"):
        try:
            as_result_kind("torch" if kind == "coo" else kind, "native")
        except ValueError as error:
            raise about("state['kind']", error) from None
    return kind  # type: ignore[return-value]  # one of the literals, checked above


def _hosts(
    state: AccumulatorState, given: Any, count: int, sum_shape: tuple[int, ...] | None
) -> tuple[Any, ...]:
    """The sum of each device as host data, or None."""
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"state['partial_sums'] is a {type(given).__name__}, not a list with an entry for "
            "each device"
        )
    if len(given) != len(state.devices):
        raise ValueError(
            f"state['partial_sums'] is of {len(given)} devices, the accumulator is on "
            f"{len(state.devices)}"
        )
    filled = sum(each is not None for each in given)
    _check_presence("partial_sums", filled > 0, count)
    if filled > count:
        raise ValueError(f"state['partial_sums'] holds {filled} sums of {count} gradients")
    sums = sums_of(state)
    return tuple(
        None
        if each is None
        else sums.checked(
            f"state['partial_sums'][{place}]", each, state.dtype, sum_shape or (), count
        )
        for place, each in enumerate(given)
    )


def _check_presence(key: str, present: bool, count: int) -> None:
    if present != (count > 0):
        what = "something" if present else "nothing"
        raise ValueError(f"state[{key!r}] holds {what}, with state['num_accumulated']={count}")


def _plain(value: Any) -> Any:
    """What stores that know only arrays have made an array without dimensions of."""
    return value.item() if is_array(value) and not tuple(value.shape) else value


def _text(key: str, value: Any) -> str:
    text = _plain(value)
    if not isinstance(text, str):
        raise TypeError(f"state[{key!r}]={brief(value)} must be a string")
    return text


def _integer(key: str, value: Any) -> int:
    try:
        return as_index(_plain(value))
    except TypeError:
        raise TypeError(f"state[{key!r}]={brief(value)} must be an integer") from None


def _shape(key: str, value: Any) -> _Shape:
    extents = _plain(value)
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
