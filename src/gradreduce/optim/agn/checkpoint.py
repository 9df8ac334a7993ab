"""What a checkpoint of a centre holds, and how one is put back.

All of it is host data, as in ``optim/checkpoint.py``; halves come as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.optim.checkpoint import (
    check_keys,
    checked_array,
    checked_state,
    copied,
    downloaded,
    end_of,
    loaded_slots,
    plain,
    queued_state,
)
from gradreduce.optim.slots import Slots

__all__ = ["assign", "check_format", "checked_values", "placed", "ready_center", "saved_center"]

_CENTER = "gradreduce AGN center 1"


def saved_center(
    rule: str, variables: Mapping[str, Variable], slots: Slots | None
) -> Callable[[float | None], dict[str, Any]]:
    """Queues copies; what it returns downloads them, in so many seconds."""
    values = {name: copied(variable.buffers[0]) for name, variable in variables.items()}
    finish = None if slots is None else queued_state(rule, slots, {})

    def download(deadline: float | None) -> dict[str, Any]:
        end = end_of(deadline)
        found = {name: downloaded(copy, end) for name, copy in values.items()}
        kept = None if finish is None else finish(end)
        return {"format": _CENTER, "variables": found, "optimizer": kept}

    return download


def ready_center(
    rule: str, variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """See ``AGNCenter.load_state_dict``: checks all, and has all memory; what it returns loads."""
    check_keys("state", state, ("format", "variables", "optimizer"))
    check_format(state, _CENTER)
    values = checked_values("state['variables']", state["variables"], variables)
    kept = plain(state["optimizer"])
    if kept is not None and slots is None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    made = None
    if slots is not None:
        owners = list(variables.values())
        given = {} if kept is None else checked_state(rule, slots, owners, kept)
        made = loaded_slots(slots, given)
    near = placed(values, variables)

    def load() -> None:
        if slots is not None and made is not None:
            slots.by_name = made
        assign(near, variables)

    return load


# -- values ---------------------------------------------------------------------------------------


def check_format(state: Mapping[str, Any], wanted: str) -> None:
    """Raises ``ValueError`` for a state of something else."""
    if plain(state["format"]) != wanted:
        raise ValueError(f"state['format'] is {plain(state['format'])!r}, not {wanted!r}")


def checked_values(
    where: str,
    given: Any,
    variables: Mapping[str, Variable],
    *,
    all_of_them: bool = True,
) -> dict[str, Any]:
    """Host arrays by the names of variables.

    Args:
        where: for messages.
        given: a dictionary.
        variables: by name.
        all_of_them: whether none may be missing.
    """
    names = set(variables)
    if not all_of_them and isinstance(given, Mapping):
        names &= set(given)
    check_keys(where, given, sorted(names))
    return {
        name: checked_array(
            f"{where}[{name!r}]", given[name], variables[name].shape,
            accumulate_dtype(variables[name].dtype),
        )
        for name in names
    }  # fmt: skip


def placed(values: Mapping[str, Any], variables: Mapping[str, Variable]) -> dict[str, Buffer]:
    """Checked host arrays on the first devices of the variables of their names, in new memory."""
    return {
        name: variables[name].devices[0].upload(converted(value, variables[name].dtype))
        for name, value in values.items()
    }


def assign(near: Mapping[str, Buffer], variables: Mapping[str, Variable]) -> None:
    """What was ``placed`` into the variables of their names."""
    for name, value in near.items():
        variables[name].assign(value)
