"""Hyperparameters: numbers, or callables that say them anew for each update."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Number", "as_number", "value_of"]

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
