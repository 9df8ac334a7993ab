"""Saves and restores the state of an AGN center as host data.

The format follows ``optim/checkpoint.py``: float16 and bfloat16 are saved as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import converted
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer
from gradreduce.optim.checkpoint import checked_arrays, queued_state, ready_state
from gradreduce.optim.slots import Slots

_CENTER = "gradreduce AGN center 1"


def queued_center(variables: Mapping[str, Variable], slots: Slots | None) -> dict[str, Any]:
    """Queues copies of a center; ``snapshots.downloaded`` downloads them."""
    return {
        "format": _CENTER,
        "variables": {name: snapshots.copied(var.buffers[0]) for name, var in variables.items()},
        "optimizer": None if slots is None else queued_state(slots),
    }


def ready_center(
    variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; the returned function loads it."""
    snapshots.check_keys("state", state, ("format", "variables", "optimizer"))
    snapshots.check_entry(state, "format", _CENTER)
    values = checked_values("state['variables']", state["variables"], variables)
    saved = snapshots.plain(state["optimizer"])
    if saved is not None and slots is None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    load_slots = None
    if slots is not None:
        load_slots = ready_state(slots, list(variables.values()), saved, lambda _: 0.0)
    buffers = placed(values, variables)

    def load() -> None:
        if load_slots is not None:
            load_slots()
        assign(buffers, variables)

    return load


# -- values ---------------------------------------------------------------------------------------


def present(saved: Any, variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Returns the variables whose names a saved dictionary has."""
    is_dict = isinstance(saved, Mapping)
    return {name: var for name, var in variables.items() if not is_dict or name in saved}


def checked_values(where: str, saved: Any, variables: Mapping[str, Variable]) -> dict[str, Any]:
    """Validates a dictionary of arrays, one for each variable; returns host arrays by name."""
    wanted = {name: (var.shape, var.dtype) for name, var in variables.items()}
    return checked_arrays(where, saved, wanted)


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
