"""Saves and restores the state of an optimizer as host data.

A state has strings, numbers, and arrays of float32 or float64, so that any store can write it and
any backend can load it. Float16 and bfloat16 slots are saved as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DType, accumulate_dtype
from gradreduce.errors import about, listed

from .hyperparameters import value_of
from .slots import MASTER, Slots

FORMAT = "gradreduce optimizer 1"
_KEYS = ("format", "optimizer", "hyperparameters", "slots")


def queued_state(slots: Slots) -> dict[str, Any]:
    """Queues copies of the state; ``snapshots.downloaded`` downloads them."""
    by_name(var for by_variable in slots.by_name.values() for var in by_variable)
    copies: dict[str, dict[str, Buffer]] = {}
    for name, by_variable in slots.by_name.items():
        for var, slot in by_variable.items():
            copies.setdefault(var.name, {})[name] = snapshots.copied(slot.buffers[0])
    return as_state(slots, copies)


def as_state(slots: Slots, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a state that has these values of slots: ``values[variable][slot]``."""
    return {
        "format": FORMAT,
        "optimizer": slots.kind.__name__,
        "hyperparameters": dict(zip(slots.power_names, slots.powers, strict=False)),
        "slots": values,
    }


def ready_state(
    slots: Slots,
    variables: Sequence[Variable] | Variable,
    state: Any,
    start: Callable[[str], float],
) -> Callable[[], None]:
    """Validates a state and allocates memory; the returned function loads it.

    Args:
        slots: to load.
        variables: that may have slots; or a single one.
        state: to load; None: there are no slots.
        start: returns the initial value of a slot, by its name.

    Raises:
        KeyError: a key is missing or unknown, or slots of a variable that was not passed.
        TypeError: a value of another type.
        ValueError: a value of another format, shape or dtype.
    """
    if state is None:
        return ready_slots(slots, {}, ())
    return ready_slots(slots, *checked_state(slots, variables, state, start))


def checked_state(
    slots: Slots,
    variables: Sequence[Variable] | Variable,
    state: Any,
    start: Callable[[str], float],
) -> tuple[dict[Variable, dict[str, Any]], tuple[float, ...]]:
    """Validates a state; returns host arrays, ``[variable][slot]``, and the powers.

    See ``ready_state`` for arguments and errors.
    """
    snapshots.check_keys("state", state, _KEYS)
    snapshots.check_entry(state, "format", FORMAT)
    snapshots.check_entry(state, "optimizer", slots.kind.__name__)
    owners = by_name([variables] if isinstance(variables, Variable) else variables)
    if not isinstance(state["slots"], Mapping):
        raise TypeError(f"state['slots'] is a {type(state['slots']).__name__}; expected a dict")
    unknown = [name for name in state["slots"] if name not in owners]
    if unknown:
        raise KeyError(
            f"state['slots'] has [{listed(map(repr, unknown))}], but no given variable has "
            "that name"
        )
    values = {}
    for owner, saved in state["slots"].items():
        var = owners[owner]
        wanted = dict.fromkeys(slots.names_for(var), (var.shape, slots.state_dtype(var)))
        values[var] = checked_arrays(f"state['slots'][{owner!r}]", saved, wanted)
    powers = _checked_powers(slots, state["hyperparameters"], values, start)
    return values, powers


def ready_slots(
    slots: Slots, values: Mapping[Variable, Mapping[str, Any]], powers: tuple[float, ...]
) -> Callable[[], None]:
    """Makes slots with these values; the returned function replaces those that exist."""
    made: dict[str, dict[Variable, Variable]] = {name: {} for name in slots.by_name}
    for var, of_var in values.items():
        for name, value in of_var.items():
            slot = made[name][var] = slots.named(var, name)
            slot.assign(converted(value, slot.dtype))

    def load() -> None:
        slots.by_name, slots.powers = made, powers

    return load


def by_name(variables: Iterable[Variable]) -> dict[str, Variable]:
    """Maps names to variables; ``ValueError`` if two have the same name."""
    owners: dict[str, Variable] = {}
    for var in variables:
        if owners.setdefault(var.name, var) is not var:
            raise ValueError(f"two variables have the name {var.name!r}; states need unique names")
    return owners


def checked_arrays(
    where: str, saved: Any, wanted: Mapping[str, tuple[tuple[int, ...], DType]]
) -> dict[str, Any]:
    """Validates a dictionary of arrays and returns host arrays.

    Args:
        where: name of the dictionary in messages.
        saved: the dictionary.
        wanted: shape and dtype of each array on a device, by name.
    """
    snapshots.check_keys(where, saved, list(wanted))
    return {
        name: snapshots.checked_array(
            f"{where}[{name!r}]", saved[name], shape, accumulate_dtype(dtype)
        )
        for name, (shape, dtype) in wanted.items()
    }


def _checked_powers(
    slots: Slots,
    saved: Any,
    values: Mapping[Variable, Mapping[str, Any]],
    start: Callable[[str], float],
) -> tuple[float, ...]:
    """Validates the hyperparameters of a state: none, or the power of each decay.

    An optimizer that was only prepared has slots but no powers yet.
    """
    if saved == {}:
        found = [each for by in values.values() for each in by.items() if each[0] != MASTER]
        if slots.power_names and any([(value != start(name)).any() for name, value in found]):
            raise ValueError(
                f"state['hyperparameters'] must have {sorted(slots.power_names)}, because its "
                "slots were updated"
            )
        return ()
    snapshots.check_keys("state['hyperparameters']", saved, slots.power_names)
    try:
        return tuple(
            value_of(name, snapshots.plain(saved[name]), is_decay=True)
            for name in slots.power_names
        )
    except (TypeError, ValueError) as error:
        raise about("state['hyperparameters']", error) from None
