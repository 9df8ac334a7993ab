"""Saves and restores the state of an optimizer as host data.

A state has strings, numbers, and arrays of float32 or float64, so that any store can write it and
any backend can load it. Float16 and bfloat16 slots are saved as float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradreduce.arrays.convert import converted, host_array, is_array, shape_and_dtype
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, DType, accumulate_dtype
from gradreduce.errors import about, listed

from .hyperparameters import check_decay
from .slots import MASTER, Slots

__all__ = [
    "by_name",
    "check_keys",
    "checked_array",
    "checked_hyperparameters",
    "checked_state",
    "copied",
    "downloaded",
    "end_of",
    "loaded_slots",
    "plain",
    "queued_state",
    "saved_state",
]

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
    return queued_state(kind, slots, hyperparameters)(end_of(deadline))


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
            copies.setdefault(var.name, {})[name] = copied(slot.buffers[0])
    scalars = dict(hyperparameters)

    def finish(end: float | None) -> dict[str, Any]:
        saved = {
            owner: {name: downloaded(copy, end) for name, copy in by_name.items()}
            for owner, by_name in copies.items()
        }
        return {"format": FORMAT, "optimizer": kind, "hyperparameters": scalars, "slots": saved}

    return finish


def end_of(deadline: float | None) -> float | None:
    """Converts seconds from now to a point in time."""
    return None if deadline is None else time.monotonic() + deadline


def copied(buffer: Buffer) -> Buffer:
    """Queues a copy on the device, so that a state is from one moment."""
    copy = buffer.device.empty(buffer.shape, buffer.dtype)
    buffer.device.copy(copy, buffer)
    return copy


def downloaded(copy: Buffer, end: float | None) -> Any:
    """Downloads a buffer in the accumulate dtype until a point in time."""
    deadline = None if end is None else max(end - time.monotonic(), 1e-6)
    return converted(copy.numpy(deadline=deadline), accumulate_dtype(copy.dtype))


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
    check_keys("state", state, _KEYS)
    for key, wanted in (("format", FORMAT), ("optimizer", kind)):
        if plain(state[key]) != wanted:
            raise ValueError(f"state[{key!r}] is {plain(state[key])!r}, not {wanted!r}")
    owners = by_name([variables] if isinstance(variables, Variable) else variables)
    if not isinstance(state["slots"], Mapping):
        raise TypeError(f"state['slots'] is a {type(state['slots']).__name__}, not a dict")
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


def check_keys(what: str, saved: Any, wanted: Sequence[str]) -> None:
    """Raises unless a dictionary has exactly these keys."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{what} is a {type(saved).__name__}, not a dict from state_dict()")
    keys = {"missing": set(wanted) - set(saved), "unknown": set(saved) - set(wanted)}
    wrong = [f"{listed(sorted(map(repr, found)))} {kind}" for kind, found in keys.items() if found]
    if wrong:
        raise KeyError(f"{what} must have exactly the keys from state_dict(): {', '.join(wrong)}")


def plain(value: Any) -> Any:
    """Returns the Python value of a zero-dimensional array, as stores of arrays write it."""
    return value.item() if is_array(value) and not tuple(value.shape) else value


def _checked_slots(where: str, slots: Slots, var: Variable, saved: Any) -> dict[str, Any]:
    names = slots.names_for(var)
    check_keys(where, saved, names)
    wanted = (var.shape, accumulate_dtype(slots.state_dtype(var)))
    found = {}
    for name in names:
        found[name] = checked_array(f"{where}[{name!r}]", saved[name], *wanted)
    return found


def checked_array(where: str, saved: Any, wanted: tuple[int, ...], of_dtype: DType) -> Any:
    """Validates an array of a state and returns it in host memory.

    Raises:
        TypeError: it is not an array.
        ValueError: it has another shape or dtype.
    """
    if not is_array(saved):
        raise TypeError(f"{where} is a {type(saved).__name__}, not an array")
    try:
        shape, dtype = shape_and_dtype(saved)
    except TypeError as error:
        raise about(where, error) from None
    if (shape, dtype) != (wanted, of_dtype):
        raise ValueError(f"{where} is {dtype}{shape}, must be {of_dtype}{wanted}")
    return host_array(saved)


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
    check_keys("state['hyperparameters']", saved, wanted)
    try:
        hyperparameters = {name: float(plain(value)) for name, value in saved.items()}
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
