"""Saves and restores the state of an AGN center as host data.

The format follows ``optim/checkpoint.py``: float16 and bfloat16 are saved as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.optim.checkpoint import checked_state, loaded_slots, queued_state
from gradreduce.optim.slots import Slots

_CENTER = "gradreduce AGN center 1"


def saved_center(
    rule: str, variables: Mapping[str, Variable], slots: Slots | None
) -> Callable[[float | None], dict[str, Any]]:
    """Queues copies of a center; the returned function downloads them before a deadline."""
    values = {name: snapshots.copied(variable.buffers[0]) for name, variable in variables.items()}
    finish = None if slots is None else queued_state(rule, slots, {})

    def download(deadline: float | None) -> dict[str, Any]:
        end = snapshots.end_of(deadline)
        found = {name: snapshots.downloaded(copy, end) for name, copy in values.items()}
        optimizer = None if finish is None else finish(end)
        return {"format": _CENTER, "variables": found, "optimizer": optimizer}

    return download


def ready_center(
    rule: str, variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; the returned function loads it."""
    snapshots.check_keys("state", state, ("format", "variables", "optimizer"))
    snapshots.check_entry(state, "format", _CENTER)
    values = checked_values("state['variables']", state["variables"], variables)
    saved = snapshots.plain(state["optimizer"])
    if saved is not None and slots is None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    made = None
    if slots is not None:
        owners = list(variables.values())
        checked = {} if saved is None else checked_state(rule, slots, owners, saved)
        made = loaded_slots(slots, checked)
    buffers = placed(values, variables)

    def load() -> None:
        if slots is not None and made is not None:
            slots.by_name = made
        assign(buffers, variables)

    return load


# -- values ---------------------------------------------------------------------------------------


def checked_values(
    where: str,
    saved: Any,
    variables: Mapping[str, Variable],
    *,
    all_of_them: bool = True,
) -> dict[str, Any]:
    """Validates a dictionary of arrays and returns host arrays by variable name.

    Args:
        where: name of the dictionary in messages.
        saved: the dictionary.
        variables: by name.
        all_of_them: whether every variable must have an array.
    """
    names = set(variables)
    if not all_of_them and isinstance(saved, Mapping):
        names &= set(saved)
    snapshots.check_keys(where, saved, sorted(names))
    return {
        name: snapshots.checked_array(
            f"{where}[{name!r}]", saved[name], variables[name].shape,
            accumulate_dtype(variables[name].dtype),
        )
        for name in names
    }  # fmt: skip


def placed(values: Mapping[str, Any], variables: Mapping[str, Variable]) -> dict[str, Buffer]:
    """Uploads validated host arrays to the first device of each variable."""
    return {
        name: variables[name].devices[0].upload(converted(value, variables[name].dtype))
        for name, value in values.items()
    }


def assign(buffers: Mapping[str, Buffer], variables: Mapping[str, Variable]) -> None:
    """Assigns the result of ``placed`` to the variables."""
    for name, value in buffers.items():
        variables[name].assign(value)
