"""What optimizers are told: numbers, or callables that say them anew for each update."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["Number", "as_count", "as_number", "check_decay", "value_of"]

Number = float | Callable[[], float]


def as_number(given: Number) -> Number:
    """As an optimizer keeps it: a callable as it is, anything else as a float.

    Raises:
        TypeError: neither a number nor a callable.
        ValueError: a text that says no number.
    """
    return given if callable(given) else float(given)


def value_of(given: Number) -> float:
    """Now; asked once for each update, before anything is launched."""
    return float(given() if callable(given) else given)


def check_decay(name: str, given: Number) -> None:
    """Raises unless a number is at least 0 and below 1; of a callable nothing is known yet."""
    if not callable(given) and not 0 <= given < 1:
        raise ValueError(f"{name}={given!r} must be at least 0 and below 1")


def as_count(name: str, given: Any, *, least: int) -> int:
    """An integer that is no less than ``least``.

    Raises:
        TypeError: no integer.
        ValueError: a smaller one.
    """
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}={given!r} must be an integer") from None
    if number < least:
        raise ValueError(f"{name}={given!r} must be at least {least}")
    return number
