"""Saves, validates and loads the state of an AGN center; see ``gradreduce.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradreduce import checkpoint
from gradreduce.arrays.variable import Variable
from gradreduce.optim.checkpoint import queued_slots, ready_slots, slots_schema
from gradreduce.optim.slots import Slots

_FORMAT = "gradreduce AGN center 2"


def queued_center(variables: Mapping[str, Variable], slots: Slots | None) -> dict[str, Any]:
    """Queues copies of a center; ``checkpoint.downloader`` downloads them."""
    return {
        "format": _FORMAT,
        "variables": checkpoint.copies_of(variables),
        "optimizer": None if slots is None else queued_slots(slots),
    }


def ready_center(
    variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; returns a function that loads it."""
    if slots is None and isinstance(state, Mapping) and state.get("optimizer") is not None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    owners = checkpoint.by_name(variables.values())
    schema = {
        "format": checkpoint.equal(_FORMAT),
        "variables": checkpoint.arrays_of(variables),
        "optimizer": checkpoint.optional(slots and slots_schema(slots, owners)),
    }
    found = checkpoint.checked("state", state, schema)
    load_values = checkpoint.ready_values(found["variables"], variables)
    if slots is None:
        return load_values
    saved = found["optimizer"]["slots"] if found["optimizer"] else {}
    load_slots = ready_slots(slots, {owners[name]: each for name, each in saved.items()})

    def load() -> None:
        load_slots()
        load_values()

    return load
