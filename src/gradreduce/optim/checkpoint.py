"""Saves and restores the state of an optimizer as host data.

A state has strings, numbers, and arrays of float32 or float64, so that any store can write it and
any backend can load it. Float16 and bfloat16 slots are saved as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.errors import about, listed

from .hyperparameters import check_decay
from .slots import MASTER, Slots

FORMAT = "gradreduce optimizer 1"
_KEYS = ("format", "optimizer", "hyperparameters", "slots")


def saved_state(
    kind: str, slots: Slots, hyperparameters: Mapping[str, float], deadline: float | None
) -> dict[str, Any]:
    """Returns the state of an optimizer; see ``Optimizer.state_dict``.

    Args:
        kind: name of the optimizer's class.
        slots: of the optimizer.
        hyperparameters: state besides the slots.
        deadline: seconds from ``as_deadline``, for all downloads together.
    """
    return queued_state(kind, slots, hyperparameters)(snapshots.end_of(deadline))


def queued_state(
    kind: str, slots: Slots, hyperparameters: Mapping[str, float]
) -> Callable[[float | None], dict[str, Any]]:
    """Queues copies of the state; the returned function downloads them until a point in time."""
    copies: dict[str, dict[str, Buffer]] = {}
    owners: dict[str, Variable] = {}
    for name, by_variable in slots.by_name.items():
        for var, slot in by_variable.items():
            if owners.setdefault(var.name, var) is not var:
                raise ValueError(
                    f"two variables have the name {var.name!r}; states need unique names"
                )
            copies.setdefault(var.name, {})[name] = snapshots.copied(slot.buffers[0])
    scalars = dict(hyperparameters)

    def finish(end: float | None) -> dict[str, Any]:
        saved = {
            owner: {name: snapshots.downloaded(copy, end) for name, copy in by_name.items()}
            for owner, by_name in copies.items()
        }
        return {"format": FORMAT, "optimizer": kind, "hyperparameters": scalars, "slots": saved}

    return finish


def checked_state(
    kind: str, slots: Slots, variables: Sequence[Variable], state: Any
) -> dict[Variable, dict[str, Any]]:
    """Validates a state, and returns its slots as host arrays by variable.

    ``variables`` may be a single one.

    Raises:
        KeyError: a key is missing or unknown, or slots of a variable that was not passed.
        TypeError: a value of another type.
        ValueError: a value of another format, shape or dtype.
    """
    snapshots.check_keys("state", state, _KEYS)
    snapshots.check_entry(state, "format", FORMAT)
    snapshots.check_entry(state, "optimizer", kind)
    owners = by_name([variables] if isinstance(variables, Variable) else variables)
    if not isinstance(state["slots"], Mapping):
        raise TypeError(f"state['slots'] is a {type(state['slots']).__name__}; expected a dict")
    unknown = [name for name in state["slots"] if name not in owners]
    if unknown:
        raise KeyError(
            f"state['slots'] has [{listed(map(repr, unknown))}], but no given variable has "
            "that name"
        )
    return {
        owners[name]: _checked_slots(f"state['slots'][{name!r}]", slots, owners[name], saved)
        for name, saved in state["slots"].items()
    }


def by_name(variables: Sequence[Variable]) -> dict[str, Variable]:
    """Maps names to variables; ``ValueError`` if two have the same name."""
    owners: dict[str, Variable] = {}
    for var in variables:
        if owners.setdefault(var.name, var) is not var:
            raise ValueError(f"two variables have the name {var.name!r}; states need unique names")
    return owners


def _checked_slots(where: str, slots: Slots, var: Variable, saved: Any) -> dict[str, Any]:
    names = slots.names_for(var)
    snapshots.check_keys(where, saved, names)
    wanted = (var.shape, accumulate_dtype(slots.state_dtype(var)))
    found = {}
    for name in names:
        found[name] = snapshots.checked_array(f"{where}[{name!r}]", saved[name], *wanted)
    return found


def checked_hyperparameters(
    state: Mapping[str, Any],
    wanted: Sequence[str],
    slots: Mapping[Variable, Mapping[str, Any]],
    start: Callable[[str], float],
) -> dict[str, float]:
    """Validates the hyperparameters of a state: none, or the power of each decay.

    Args:
        state: to load.
        wanted: names of the powers.
        slots: of the state. An optimizer that was only prepared has slots but no powers yet.
        start: returns the initial value of a slot, by its name.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value is not a number.
        ValueError: a number that is not a decay, or no hyperparameters although slots were updated.
    """
    saved = state["hyperparameters"]
    if saved == {}:
        found = [each for by in slots.values() for each in by.items() if each[0] != MASTER]
        if wanted and any([(value != start(name)).any() for name, value in found]):
            raise ValueError(
                f"state['hyperparameters'] must have {sorted(wanted)}, because its slots were "
                "updated"
            )
        return {}
    snapshots.check_keys("state['hyperparameters']", saved, wanted)
    try:
        hyperparameters = {name: float(snapshots.plain(value)) for name, value in saved.items()}
        for name, number in hyperparameters.items():
            check_decay(name, number)
    except (TypeError, ValueError) as error:
        raise about("state['hyperparameters']", error) from None
    return hyperparameters


def loaded_slots(
    slots: Slots, values_of: Mapping[Variable, Mapping[str, Any]]
) -> dict[str, dict[Variable, Variable]]:
    """Creates new slots with these values on every device of their variables."""
    made: dict[str, dict[Variable, Variable]] = {name: {} for name in slots.by_name}
    for var, values in values_of.items():
        for name, value in values.items():
            slot = slots.named(var, name)
            slot.assign(converted(value, slot.dtype))
            made[name][var] = slot
    return made
