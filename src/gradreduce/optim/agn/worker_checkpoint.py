"""Saves and restores the state of an AGN worker as host data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradreduce.arrays import snapshots
from gradreduce.arrays.indexed_slices import IndexedSlices
from gradreduce.arrays.variable import Variable
from gradreduce.device import accumulate_dtype
from gradreduce.errors import about, listed
from gradreduce.optim.checkpoint import by_name, queued_state, ready_state
from gradreduce.optim.hyperparameters import as_count

from .checkpoint import assign, checked_values, placed, present
from .worker import Worker

_WORKER = "gradreduce AGN worker 1"
_MOST_STEPS = 2**31 - 1
_KEYS = ("format", "optimizer", "variables", "sums", "rows", "pulled", "local_step", "is_due")


def queued_worker(worker: Worker) -> dict[str, Any]:
    """Queues copies of the state of a worker; ``snapshots.downloaded`` downloads them."""
    members = worker.members
    variables = by_name(member.local for member in members)
    sums, rows = {}, {}
    for member in members:
        total, name = member.total, member.local.name
        if total.rows is not None:
            merged = total.merged()
            rows[name] = {"indices": merged.indices.copy(), "values": merged.values}
        elif not total.is_empty:
            sums[name] = snapshots.copied(total.allocated[0])
    pulled = {var.name: snapshots.copied(kept.buffers[0]) for var, kept in worker.pulled.items()}
    return {
        "format": _WORKER,
        "optimizer": queued_state(worker.inner._slots),
        "variables": {name: snapshots.copied(var.buffers[0]) for name, var in variables.items()},
        "sums": sums,
        "rows": rows,
        "pulled": pulled,
        "local_step": worker.step.value,
        "is_due": worker.is_due,
    }


def load_worker(worker: Worker, state: Any) -> None:
    """Validates and restores a worker's state; see ``AGNOptimizer.load_state_dict``."""
    snapshots.check_keys("state", state, _KEYS)
    snapshots.check_entry(state, "format", _WORKER)
    variables = by_name(member.local for member in worker.members)
    values = checked_values("state['variables']", state["variables"], variables)
    sums, pulled = (
        checked_values(f"state[{key!r}]", state[key], present(state[key], variables))
        for key in ("sums", "pulled")
    )
    rows = _checked_rows(state["rows"], variables)
    both = sorted(set(sums) & set(rows))
    if both:
        raise ValueError(
            f"state['sums'] and state['rows'] both have [{listed(map(repr, both))}]; a sum is "
            "either dense or sparse"
        )
    unknown = sorted((set(sums) | set(rows)) - set(pulled)) if worker.by_distance else []
    if unknown:
        raise ValueError(
            f"state['pulled'] has no [{listed(map(repr, unknown))}], but state has sums of them; "
            "it was saved by a worker without distance_scale"
        )
    step, is_due = _checked_counts(state)
    if is_due and not sums and not rows:
        raise ValueError("state['is_due'] is true, but there are no sums to push")
    inner = worker.inner
    load_slots = ready_state(
        inner._slots, list(variables.values()), state["optimizer"], inner._slot_start
    )
    buffers = placed(values, variables)
    kept = {
        variables[name]: worker.new_pulled(variables[name], buffer)
        for name, buffer in placed(pulled, variables).items()
    }
    load_slots()
    assign(buffers, variables)
    for member in worker.members:
        member.total.update(sums.get(member.local.name), rows.get(member.local.name))
    worker.step.value, worker.is_due, worker.pulled = step, is_due, kept


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
    wanted = present(saved, variables)
    snapshots.check_keys("state['rows']", saved, list(wanted))
    found = {}
    for name, var in wanted.items():
        here = f"state['rows'][{name!r}]"
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
