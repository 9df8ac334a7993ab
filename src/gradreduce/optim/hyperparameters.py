"""Hyperparameters: numbers, or callables and Variables that are read at each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, NamedTuple
from zlib import crc32

from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import integer
from gradreduce.errors import InitT, brief, refuses

_COMPARED_EACH = 100  # updates

Number = float | Variable | Callable[[], float]
# Arguments of PyTorch's optimizers, and ours for the same.
_OF_PYTORCH = {
    "lr": ("learning_rate",),
    "betas": ("beta1", "beta2"),
    "eps": ("epsilon",),
    "nesterov": ("use_nesterov",),
    "alpha": ("decay",),
}


def refuses_pytorch(**hints: str) -> Callable[[InitT], InitT]:
    """Decorates the constructor of an optimizer: PyTorch's names of arguments raise a hint.

    Args:
        hints: what to do instead, for arguments that the constructor has under no other name.
    """

    def decorate(init: InitT) -> InitT:
        names = signature(init).parameters
        all_hints = {"params": "pass it to gr.torch.Optimizer(optimizer, params)", **hints}
        for name, ours in _OF_PYTORCH.items():
            if set(ours).issubset(names):
                all_hints[name] = f"pass {' and '.join(f'{each}=' for each in ours)}"
        return refuses(all_hints)(init)

    return decorate


def as_number(name: str, value: Number, *, is_decay: bool = False) -> Number:
    """Validates a hyperparameter; converts it to float unless it is a callable or Variable.

    Raises:
        TypeError: it cannot be converted to float.
        ValueError: it is a string that is not a number, a Variable that is not a scalar, or a decay
            that is below 0 or not below 1.
    """
    if isinstance(value, Variable) and value.shape:
        raise ValueError(f"{name}={brief(value)} must hold one number")
    if isinstance(value, Variable) or callable(value):
        return value
    return value_of(name, value, is_decay=is_decay)


def value_of(name: str, value: Number, *, is_decay: bool = False) -> float:
    """Returns the current value. Reading a Variable waits for its device."""
    current: Any = value() if callable(value) else value
    if isinstance(current, Variable):
        current = current.numpy()
    try:
        number = float(current)
    except (TypeError, ValueError, OverflowError) as error:
        what = f"{name}={text_of(value)} must be"
        if current is not value:
            what = f"{name}={text_of(value)} returned {brief(current)}; it must return"
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what} a number") from None
    if is_decay and not 0 <= number < 1:
        raise ValueError(f"{name}={brief(number)} must be at least 0 and below 1")
    return number


class History(NamedTuple):
    """What updates over processes have read from callables and Variables.

    Attributes:
        num_updates: the number of these updates.
        digest: a checksum of all values that they read.
    """

    num_updates: int = 0
    digest: int = 0

    def after(self, read: Mapping[str, float]) -> History:
        """Returns the history after an update that has read these values."""
        if not read:
            return self
        return History(self.num_updates + 1, crc32(repr(read).encode(), self.digest))

    def numbers_to_compare(self, last: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Returns what to compare with other processes before the next update; mostly nothing.

        A comparison waits for all processes. So there is one after 1, 2, 4, … updates, and one
        after each 100th. The checksum covers the updates between them.

        Args:
            last: returns the values that the last update read, by the names for errors.
        """
        count = self.num_updates
        if not count or (count & (count - 1) and count % _COMPARED_EACH):
            return {}
        return {**last(), "the checksum of the hyperparameters of all updates": self.digest}


def text_of(value: Any) -> str:
    """Formats a hyperparameter for a ``repr``; a callable by its name."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return brief(value)


def as_integer(name: str, value: Any, *, least: int) -> int:
    """Validates an integer that must be at least ``least``.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is smaller.
    """
    return integer(least)(name, value)


def no_attribute(owner: str, name: str, known: Sequence[str], holder: str = "") -> AttributeError:
    """Returns the error for setting an attribute that an optimizer does not have.

    Args:
        owner: name of the optimizer's class.
        name: name of the attribute.
        known: the names that can be set.
        holder: the object that has these attributes, if it is not the optimizer itself.
    """
    same = [each for each in _OF_PYTORCH.get(name, ()) if each in known]
    *others, last = same or get_close_matches(name, known) or known
    meant = f"{', '.join(others)} or {last}" if others else last
    where = f" of {holder}" if holder else ""
    return AttributeError(f"{owner} has no attribute {name!r}: set {meant}{where}")
