"""Copies arrays to host memory for checkpoints, and validates those of a loaded state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradreduce.device import Buffer, DType, accumulate_dtype, copied_to
from gradreduce.errors import about, brief, listed

from .convert import converted, host_array, is_array, shape_and_dtype


def end_of(deadline: float | None) -> float | None:
    """Converts seconds from now to a point in time."""
    return None if deadline is None else time.monotonic() + deadline


def copied(buffer: Buffer) -> Buffer:
    """Queues a copy on the device, so that a state is from one moment."""
    return copied_to(buffer.device, buffer)


def downloaded(copy: Any, end: float | None) -> Any:
    """Downloads a buffer in the accumulate dtype until a point in time.

    Of dictionaries it downloads every buffer, and returns the other values as they are.
    """
    if isinstance(copy, Mapping):
        return {key: downloaded(value, end) for key, value in copy.items()}
    if not isinstance(copy, Buffer):
        return copy
    deadline = None if end is None else max(end - time.monotonic(), 1e-6)
    array, dtype = copy.numpy(deadline=deadline), accumulate_dtype(copy.dtype)
    return array if array.dtype == dtype else converted(array, dtype)


def check_keys(what: str, saved: Any, wanted: Sequence[str]) -> None:
    """Raises unless a dictionary has exactly these keys."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{what} is a {type(saved).__name__}; expected a dict from state_dict()")
    keys = {"missing": set(wanted) - set(saved), "unknown": set(saved) - set(wanted)}
    wrong = [f"{listed(sorted(map(repr, found)))} {kind}" for kind, found in keys.items() if found]
    if wrong:
        raise KeyError(f"{what} must have exactly the keys from state_dict(): {', '.join(wrong)}")


def check_entry(state: Mapping[str, Any], key: str, wanted: str) -> None:
    """Raises ``ValueError`` if an entry of a state is not this string."""
    found = plain(state[key])
    if not isinstance(found, str) or found != wanted:
        raise ValueError(f"state[{key!r}] is {brief(found)}; expected {wanted!r}")


def plain(value: Any) -> Any:
    """Returns the Python value of a zero-dimensional array, as stores of arrays write it."""
    return value.item() if is_array(value) and not tuple(value.shape) else value


def checked_array(where: str, saved: Any, wanted: tuple[int, ...], of_dtype: DType) -> Any:
    """Validates an array of a state and returns it in host memory.

    Raises:
        TypeError: it is not an array.
        ValueError: it has another shape or dtype.
    """
    if not is_array(saved):
        raise TypeError(f"{where} is a {type(saved).__name__}; expected an array")
    try:
        shape, dtype = shape_and_dtype(saved)
    except TypeError as error:
        raise about(where, error) from None
    if (shape, dtype) != (wanted, of_dtype):
        raise ValueError(f"{where} is {dtype}{shape}; expected {of_dtype}{wanted}")
    return host_array(saved)
