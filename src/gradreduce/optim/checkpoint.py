"""Saves slots and hyperparameters, and validates and loads them; see ``gradreduce.checkpoint``.

Float16 and bfloat16 slots are saved as float32. Hyperparameters that are callables or Variables are
saved as None. A load does not replace hyperparameters that are None in the state, or callables or
Variables in the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradreduce import checkpoint
from gradreduce.arrays.convert import converted, is_array
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import Check, array, equal, flag, plain, some_of
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.device.process_group import digest_of
from gradreduce.errors import brief, listed, log_warning

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


def queued_fingerprints(slots: Slots) -> dict[str, Any]:
    """Queues fingerprints of the values of variables that have slots and no name.

    If another program makes variables in another order, they have each other's names. The first
    call that finds some whose slots could be exchanged logs a warning.
    """
    owners = {var.name: var for by_variable in slots.by_name.values() for var in by_variable}
    alike = [name for names in _alike(owners) for name in names]
    if alike and not slots.has_warned:
        slots.has_warned = True
        log_warning(
            "gradreduce.checkpoint",
            "the state of %s has slots of Variables without a name whose slots are alike: %s. "
            "They are numbered as they are made, and a program that makes them in another order "
            "would exchange their slots: give each a name",
            slots.owner, listed(alike),
        )  # fmt: skip
    return {name: _queued_fingerprint(owners[name]) for name in checkpoint.numbered(owners)}


def check_fingerprints(
    where: str, saved: Mapping[str, Any], owners: Mapping[str, Variable]
) -> None:
    """Raises if variables have the values that the state has of each other.

    Other values are accepted: the variables may be loaded later.

    Args:
        where: the name of the entry, for the error.
        saved: the downloaded ``queued_fingerprints``.
        owners: variables by name: those of ``saved``, and others, which may have the values too.

    Raises:
        ValueError: variables whose slots are alike have all of the saved values, in another order.
    """
    for names in _alike(owners):
        wanted = {name: plain(f"{where}[{name!r}]", saved[name]) for name in names if name in saved}
        if not wanted:
            continue
        found = {name: _queued_fingerprint(owners[name])(Buffer.numpy) for name in names}
        wrong = [name for name, value in wanted.items() if found[name] != value]
        if wrong and not Counter(wanted.values()) - Counter(found.values()):
            name = wrong[0]
            other = next(each for each in names if found[each] == wanted[name])
            raise ValueError(
                f"{where}: the value of {other!r} is that of {name!r} in the state, so the slots "
                f"would be exchanged{checkpoint.NUMBERED}"
            )


def fingerprint(where: str, saved: Any) -> str:
    """Validates a saved fingerprint."""
    found = plain(where, saved)
    if not isinstance(found, str):
        raise TypeError(f"{where}={brief(saved)} must be a string")
    return found


def _alike(owners: Mapping[str, Variable]) -> list[list[str]]:
    """Returns the names of Variables without a name, in groups whose saved slots are alike.

    Slots of float16 and bfloat16 are saved as float32, so they fit each other.
    """
    groups: dict[Any, list[str]] = {}
    for name in checkpoint.numbered(owners):
        var = owners[name]
        groups.setdefault((var.shape, accumulate_dtype(var.dtype)), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _queued_fingerprint(var: Variable) -> Callable[[Callable[[Buffer], Any]], str]:
    """Queues a copy; returns a function that returns its fingerprint, see ``downloader``."""
    copy = checkpoint.copied(var.buffers[0])
    return lambda download: digest_of(converted(download(copy), var.dtype).tobytes())


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
    return partial(setattr, slots, "by_name", made)


def saved_number(value: Any) -> Any:
    """Returns the saved value of a hyperparameter: None for a callable or Variable."""
    if _is_computed(value):
        return None
    return value.tolist() if is_array(value) else value


def _is_computed(value: Any) -> bool:
    return callable(value) or isinstance(value, Variable)


def power(where: str, saved: Any) -> float:
    """Validates a saved power of a decay."""
    return value_of(where, plain(where, saved), is_decay=True)


def number_like(own: Any, *, is_decay: bool) -> Check:
    """Returns a check for a saved hyperparameter; the check returns the value to load.

    Args:
        own: the value that the optimizer has: a number, bool, string, callable or Variable.
        is_decay: whether the value must be at least 0 and below 1.
    """

    def check(where: str, saved: Any) -> Any:
        found = plain(where, saved)
        if found is None or _is_computed(own):
            return own
        if isinstance(own, str):  # such as eps_mode, which is part of the rule
            return equal(own)(where, found)
        if isinstance(own, bool):
            return flag(where, found)
        return value_of(where, found, is_decay=is_decay)

    return check
