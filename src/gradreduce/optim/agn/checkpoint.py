"""Saves the state of an AGN center, and validates and loads it; see ``gradreduce.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import (
    arrays_of,
    assign,
    by_name,
    checked,
    copies_of,
    equal,
    optional,
    uploaded,
)
from gradreduce.optim.checkpoint import queued_slots, ready_slots, slots_schema
from gradreduce.optim.slots import Slots

_FORMAT = "gradreduce AGN center 2"


def queued_center(variables: Mapping[str, Variable], slots: Slots | None) -> dict[str, Any]:
    """Queues copies of a center; ``checkpoint.downloader`` downloads them."""
    return {
        "format": _FORMAT,
        "variables": copies_of(variables),
        "optimizer": None if slots is None else queued_slots(slots),
    }


def ready_center(
    variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; the returned function loads it."""
    if slots is None and isinstance(state, Mapping) and state.get("optimizer") is not None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    owners = by_name(variables.values())
    slots_or_none = equal(None) if slots is None else optional(slots_schema(slots, owners))
    schema = {
        "format": equal(_FORMAT),
        "variables": arrays_of(variables),
        "optimizer": slots_or_none,
    }
    found = checked("state", state, schema)
    saved = (found["optimizer"] or {"slots": {}})["slots"]
    values = {owners[name]: of_var for name, of_var in saved.items()}
    load_slots = None if slots is None else ready_slots(slots, values)
    buffers = uploaded(found["variables"], variables)

    def load() -> None:
        if load_slots is not None:
            load_slots()
        assign(buffers, variables)

    return load
