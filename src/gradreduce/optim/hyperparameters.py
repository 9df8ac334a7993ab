"""Hyperparameters: numbers, or callables and Variables that give one for each update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import as_index
from gradreduce.errors import brief

__all__ = ["Number", "as_count", "as_number", "check_decay", "no_attribute", "shown", "value_of"]

Number = float | Variable | Callable[[], float]


def as_number(name: str, given: Number) -> Number:
    """Validates a hyperparameter; converts anything but a callable or Variable to float.

    Raises:
        TypeError: it is none of these.
        ValueError: a string that is not a number, or a Variable that is not a scalar.
    """
    if isinstance(given, Variable):
        if given.shape:
            raise ValueError(f"{name}={brief(given)} must hold one number")
        return given
    return given if callable(given) else _as_float(name, given, given)


def value_of(name: str, given: Number) -> float:
    """Returns the current value; reading a Variable waits for its device."""
    said = given() if callable(given) else given
    return _as_float(name, given, said.numpy() if isinstance(said, Variable) else said)


def _as_float(name: str, given: Any, said: Any) -> float:
    try:
        return float(said)
    except (TypeError, ValueError) as error:
        what = f"{name}={shown(given)} must be"
        if said is not given:
            what = f"{name}={shown(given)} returned {brief(said)}; it must return"
        raise type(error)(f"{what} a number") from None


def shown(given: Any) -> str:
    """Formats a hyperparameter for a ``repr``; a callable by its name."""
    if callable(given):
        return getattr(given, "__qualname__", type(given).__qualname__)
    return brief(given)


def check_decay(name: str, given: Number) -> None:
    """Raises unless a number is at least 0 and below 1; skips callables and Variables."""
    if not callable(given) and not isinstance(given, Variable) and not 0 <= given < 1:
        raise ValueError(f"{name}={brief(given)} must be at least 0 and below 1")


def as_count(name: str, given: Any, *, least: int) -> int:
    """Validates an integer that must be at least ``least``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is smaller.
    """
    try:
        number = as_index(given)
    except TypeError:
        raise TypeError(f"{name}={brief(given)} must be an integer") from None
    if number < least:
        raise ValueError(f"{name}={brief(given)} must be at least {least}")
    return number


def no_attribute(owner: str, name: str, known: Sequence[str], holder: str = "") -> AttributeError:
    """Returns the error for setting an attribute that an optimizer does not have.

    Args:
        owner: class of the optimizer.
        name: of the attribute.
        known: names that can be set.
        holder: object that has them, if not the optimizer itself.
    """
    *others, last = get_close_matches({"lr": "learning_rate"}.get(name, name), known) or known
    meant = f"{', '.join(others)} or {last}" if others else last
    where = f" of {holder}" if holder else ""
    return AttributeError(f"{owner} has no attribute {name!r}: set {meant}{where}")
