"""Saves, validates and loads the state of an AGN center and of a worker.

See ``gradreduce.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradreduce import checkpoint
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import anything, constant, integer, some_of, upload_like
from gradreduce.device import DeferInterrupts
from gradreduce.errors import listed
from gradreduce.optim.checkpoint import queue_slots, ready_slots, slots_schema
from gradreduce.optim.slots import Slots

from .sums import Sum
from .worker import Worker

_CENTER, _WORKER = "gradreduce AGN center 2", "gradreduce AGN worker 2"


def queue_center(variables: Mapping[str, Variable], slots: Slots | None) -> dict[str, Any]:
    """Queues copies of a center; ``checkpoint.downloader`` downloads them."""
    return {
        "format": _CENTER,
        "variables": checkpoint.queue_copies(variables),
        "optimizer": None if slots is None else queue_slots(slots),
    }


def ready_center(
    variables: Mapping[str, Variable], slots: Slots | None, state: Any
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; returns a function that loads it."""
    if slots is None and isinstance(state, Mapping) and state.get("optimizer") is not None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    owners = checkpoint.by_name(variables.values())
    schema = {
        "format": checkpoint.constant(_CENTER),
        "variables": checkpoint.arrays_of(variables),
        "optimizer": checkpoint.optional(slots and slots_schema(slots, owners)),
    }
    values = checkpoint.validate_state("state", state, schema)
    load_values = checkpoint.ready_values(values["variables"], variables)
    if slots is None:
        return load_values
    saved = values["optimizer"]["slots"] if values["optimizer"] else {}
    load_slots = ready_slots(slots, {owners[name]: each for name, each in saved.items()})

    def load() -> None:
        load_slots()
        load_values()

    return load


def queue_worker(worker: Worker) -> dict[str, Any]:
    """Queues copies of the state of a worker; ``checkpoint.downloader`` downloads them."""
    shared = worker.variables
    sums = {
        var.name: checkpoint.queue_copy(total[0])
        if isinstance(total, tuple)
        else SPARSE.save(total)
        for var, total in shared.sums.items()
    }
    return {
        "format": _WORKER,
        "optimizer": worker.inner._queue_state(),
        "variables": checkpoint.queue_copies(checkpoint.by_name(shared.centers)),
        "sums": sums,
        "pulled": {var.name: checkpoint.queue_copy(kept) for var, kept in shared.pulled.items()},
        "local_step": shared.num_steps,
        "is_due": worker.push_pending,
    }


def load_worker(worker: Worker, state: Any) -> None:
    """Validates and restores a worker's state; see ``AGNOptimizer.load_state_dict``."""
    shared = worker.variables
    variables = checkpoint.by_name(shared.centers)
    schema = {
        "format": constant(_WORKER),
        "optimizer": anything,
        "variables": checkpoint.arrays_of(variables),
        "sums": some_of({name: partial(_ready_sum, var) for name, var in variables.items()}),
        "pulled": some_of(checkpoint.arrays_of(variables)),
        "local_step": integer(0, 2**31 - 1),
        "is_due": checkpoint.flag,
    }
    values = checkpoint.validate_state("state", state, schema)
    sums, pulled = values["sums"], values["pulled"]
    unknown = sorted(sums.keys() - pulled.keys())
    if unknown and worker.config.gamma is not None:
        raise ValueError(
            f"state['pulled'] has no [{listed(map(repr, unknown))}], but state has sums of them; "
            "it was saved by a worker without distance_scale"
        )
    if values["is_due"] and not sums:
        raise ValueError("state['is_due'] is true, but there are no sums to push")
    load_optimizer = worker.inner._ready_state(
        values["optimizer"], list(variables.values()), "state['optimizer']"
    )
    load_values = checkpoint.ready_values(values["variables"], variables)
    totals = {variables[name]: upload() for name, upload in sums.items()}
    kept = {variables[name]: upload_like(each, variables[name]) for name, each in pulled.items()}
    with DeferInterrupts():
        load_optimizer()
        load_values()
        shared.sums, shared.pulled = totals, kept
        shared.num_steps, worker.push_pending = values["local_step"], values["is_due"]


def _ready_sum(var: Variable, where: str, saved: Any) -> Callable[[], Sum]:
    """Validates a saved sum, an array or a dict of rows; returns a function that uploads it."""
    if isinstance(saved, Mapping):  # any count is allowed: pushes do not use counts
        load = SPARSE.load(where, saved, var.dtype, var.shape, 2**63 - 1)
        return partial(load, var.devices[0])
    host = checkpoint.array(var.shape, var.dtype)(where, saved)
    return lambda: tuple([device.upload(host) for device in var.devices])
