"""Saves slots and hyperparameters, and validates and loads them; see ``gradreduce.checkpoint``.

Float16 and bfloat16 slots are saved as float32. Hyperparameters that are callables or Variables are
saved as None. A load does not replace hyperparameters that are None in the state, or callables or
Variables in the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce import checkpoint
from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import Check, array, equal, flag, plain, some_of

from .hyperparameters import value_of
from .slots import Slots


def queued_slots(slots: Slots) -> dict[str, Any]:
    """Queues copies of all slots; ``checkpoint.downloader`` downloads them."""
    checkpoint.by_name(var for by_variable in slots.by_name.values() for var in by_variable)
    copies: dict[str, Any] = {}
    for name, by_variable in slots.by_name.items():
        for var, slot in by_variable.items():
            copies.setdefault(var.name, {})[name] = checkpoint.copied(slot.buffers[0])
    return {"optimizer": slots.kind.__name__, "slots": copies}


def slots_schema(slots: Slots, owners: Mapping[str, Variable]) -> dict[str, Check]:
    """Returns the schema of ``queued_slots``, where any of these variables have slots."""
    wanted = {
        name: dict.fromkeys(slots.names_for(var), array(var.shape, slots.state_dtype(var)))
        for name, var in owners.items()
    }
    return {"optimizer": equal(slots.kind.__name__), "slots": some_of(wanted)}


def ready_slots(slots: Slots, values: Mapping[Variable, Mapping[str, Any]]) -> Callable[[], None]:
    """Creates slots with these values; returns a function that replaces the existing slots."""
    made: dict[str, dict[Variable, Variable]] = {name: {} for name in slots.by_name}
    for var, of_var in values.items():
        for name, value in of_var.items():
            slot = made[name][var] = slots.named(var, name)
            slot.assign(converted(value, slot.dtype))

    def load() -> None:
        slots.by_name = made

    return load


def saved_number(value: Any) -> Any:
    """Returns the saved value of a hyperparameter: None for a callable or Variable."""
    return None if _is_computed(value) else plain(value)


def _is_computed(value: Any) -> bool:
    return callable(value) or isinstance(value, Variable)


def power(where: str, saved: Any) -> float:
    """Validates a saved power of a decay."""
    return value_of(where, plain(saved), is_decay=True)


def number_like(own: Any, *, is_decay: bool) -> Check:
    """Returns a check for a saved hyperparameter; the check returns the value to load.

    Args:
        own: the value that the optimizer has: a number, bool, string, callable or Variable.
        is_decay: whether the value must be at least 0 and below 1.
    """

    def check(where: str, saved: Any) -> Any:
        found = plain(saved)
        if found is None or _is_computed(own):
            return own
        if isinstance(own, str):  # such as eps_mode, which is part of the rule
            return equal(own)(where, found)
        if isinstance(own, bool):
            return flag(where, found)
        return value_of(where, found, is_decay=is_decay)

    return check
