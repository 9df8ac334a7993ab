"""Saves and restores the state of an AGN worker as host data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import converted
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype
from gradreduce.errors import about, listed
from gradreduce.optim.checkpoint import (
    by_name,
    checked_hyperparameters,
    checked_state,
    loaded_slots,
    saved_state,
)
from gradreduce.optim.hyperparameters import as_count
from gradreduce.optim.optimizer import Optimizer

from .checkpoint import assign, checked_values, placed
from .variables import Member

_WORKER = "gradreduce AGN worker 1"
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class WorkerState:
    """State of a worker besides its variables and the inner optimizer.

    Attributes:
        local_step: number of steps.
        is_due: whether a push failed and must be made.
        pulled: the center at the last pull.
    """

    local_step: int
    is_due: bool
    pulled: dict[Variable, Variable]


_KEYS = ("format", "optimizer", "variables", "sums", "rows", "pulled", "local_step", "is_due")


def saved_worker(
    inner: Optimizer, members: Sequence[Member], worker: WorkerState, deadline: float | None
) -> dict[str, Any]:
    """Returns the state of a worker; see ``AGNOptimizer.state_dict``."""
    end = snapshots.end_of(deadline)
    owners = {member.local.name: member for member in members}
    by_name([member.local for member in members])
    values = {name: snapshots.copied(member.local.buffers[0]) for name, member in owners.items()}
    full = {name: member.total for name, member in owners.items() if not member.total.is_empty}
    sums = {
        name: snapshots.copied(total.current)
        for name, total in full.items()
        if isinstance(total.current, Buffer)
    }
    rows = {name: total.merged() for name, total in full.items() if total.rows is not None}
    pulled = {var.name: snapshots.copied(kept.buffers[0]) for var, kept in worker.pulled.items()}
    return {
        "format": _WORKER,
        "optimizer": saved_state(
            type(inner).__name__, inner._slots, inner._saved_hyperparameters(), None
        ),
        "variables": {name: snapshots.downloaded(copy, end) for name, copy in values.items()},
        "sums": {name: snapshots.downloaded(copy, end) for name, copy in sums.items()},
        "rows": {
            name: {"indices": each.indices.copy(), "values": snapshots.downloaded(each.values, end)}
            for name, each in rows.items()
        },
        "pulled": {name: snapshots.downloaded(copy, end) for name, copy in pulled.items()},
        "local_step": worker.local_step,
        "is_due": worker.is_due,
    }


def load_worker(
    inner: Optimizer, members: Sequence[Member], state: Any, *, by_distance: bool
) -> WorkerState:
    """Validates and restores a worker's state; see ``AGNOptimizer.load_state_dict``.

    Args:
        inner: the worker's optimizer.
        members: its variables.
        state: to load.
        by_distance: whether the worker has a ``distance_scale``.
    """
    snapshots.check_keys("state", state, _KEYS)
    snapshots.check_entry(state, "format", _WORKER)
    owners = {member.local.name: member for member in members}
    variables = by_name([member.local for member in members])
    values = checked_values("state['variables']", state["variables"], variables)
    sums = checked_values("state['sums']", state["sums"], variables, all_of_them=False)
    pulled = checked_values("state['pulled']", state["pulled"], variables, all_of_them=False)
    rows = _checked_rows(state["rows"], variables)
    both = sorted(set(sums) & set(rows))
    if both:
        raise ValueError(
            f"state['sums'] and state['rows'] both have [{listed(map(repr, both))}]; a sum is "
            "either dense or sparse"
        )
    unknown = sorted((set(sums) | set(rows)) - set(pulled)) if by_distance else []
    if unknown:
        raise ValueError(
            f"state['pulled'] has no [{listed(map(repr, unknown))}], but state has sums of them; "
            "it was saved by a worker without distance_scale"
        )
    step, is_due = _checked_counts(state)
    if is_due and not sums and not rows:
        raise ValueError("state['is_due'] is true, but there are no sums to push")
    checked = checked_state(
        type(inner).__name__, inner._slots, list(variables.values()), state["optimizer"]
    )
    hyperparameters = checked_hyperparameters(
        state["optimizer"], inner._hyperparameter_names, checked, inner._slot_start
    )
    slots, buffers = loaded_slots(inner._slots, checked), placed(values, variables)
    pulled_variables = {}
    for name, value in pulled.items():
        var = variables[name]
        pulled_variables[var] = Variable(
            converted(value, var.dtype), f"pulled/{name}", trainable=False, device=var.devices[0]
        )
    inner._slots.by_name = slots
    inner._plan = None
    inner._load_hyperparameters(hyperparameters)
    assign(buffers, variables)
    for name, member in owners.items():
        member.total.update(sums.get(name), rows.get(name))
    return WorkerState(step, is_due, pulled_variables)


def _checked_counts(state: Mapping[str, Any]) -> tuple[int, bool]:
    """Validates and returns the local step, and whether a push is due."""
    step = as_count("state['local_step']", snapshots.plain(state["local_step"]), least=0)
    if step > _MOST_STEPS:
        raise ValueError(f"state['local_step'] is {step}, more than an int32 holds")
    is_due = snapshots.plain(state["is_due"])
    if not isinstance(is_due, bool):
        raise TypeError(f"state['is_due'] is {is_due!r}, must be True or False")
    return step, is_due


def _checked_rows(saved: Any, variables: Mapping[str, Variable]) -> dict[str, IndexedSlices]:
    """Validates the sparse sums and returns them by variable name."""
    names = set(saved) & set(variables) if isinstance(saved, Mapping) else set(variables)
    snapshots.check_keys("state['rows']", saved, sorted(names))
    found = {}
    for name in names:
        here, var = f"state['rows'][{name!r}]", variables[name]
        snapshots.check_keys(here, saved[name], ("indices", "values"))
        try:
            rows = IndexedSlices(saved[name]["values"], saved[name]["indices"], var.shape)
        except (TypeError, ValueError) as error:
            raise about(here, error) from None
        shape = (len(rows.indices), *var.shape[1:])
        values = snapshots.checked_array(
            f"{here}['values']", saved[name]["values"], shape, accumulate_dtype(var.dtype)
        )
        placed = var.devices[0].upload(values)
        found[name] = IndexedSlices.of(placed, rows.indices, var.shape)
    return found
