"""What optimizers are told: numbers, or callables and Variables that say them for each update."""

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
    """As an optimizer keeps it: a callable or a Variable as it is, anything else as a float.

    Raises:
        TypeError: none of them.
        ValueError: a text that says no number, or a Variable that holds not one number.
    """
    if isinstance(given, Variable):
        if given.shape:
            raise ValueError(f"{name}={brief(given)} must hold one number")
        return given
    return given if callable(given) else _as_float(name, given, given)


def value_of(name: str, given: Number) -> float:
    """Now; asked once for each update, before anything is launched. Waits for a Variable."""
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
    """For a ``repr``: a callable by its name, anything else as it is."""
    if callable(given):
        return getattr(given, "__qualname__", type(given).__qualname__)
    return brief(given)


def check_decay(name: str, given: Number) -> None:
    """Raises unless a number is at least 0 and below 1; of one to be asked nothing is known yet."""
    if not callable(given) and not isinstance(given, Variable) and not 0 <= given < 1:
        raise ValueError(f"{name}={brief(given)} must be at least 0 and below 1")


def as_count(name: str, given: Any, *, least: int) -> int:
    """An integer that is no less than ``least``.

    Raises:
        TypeError: no integer.
        ValueError: a smaller one.
    """
    try:
        number = as_index(given)
    except TypeError:
        raise TypeError(f"{name}={brief(given)} must be an integer") from None
    if number < least:
        raise ValueError(f"{name}={brief(given)} must be at least {least}")
    return number


def no_attribute(owner: str, name: str, known: Sequence[str], holder: str = "") -> AttributeError:
    """What is raised when an attribute is set that an optimizer has not.

    Args:
        owner: class of the optimizer.
        name: of the attribute.
        known: what may be set.
        holder: what has it, if not the optimizer itself.
    """
    *others, last = get_close_matches({"lr": "learning_rate"}.get(name, name), known) or known
    meant = f"{', '.join(others)} or {last}" if others else last
    where = f" of {holder}" if holder else ""
    return AttributeError(f"{owner} has no attribute {name!r}: set {meant}{where}")
