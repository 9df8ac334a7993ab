"""Saves, validates and loads the state of an AGN center and of a worker.

See ``gradreduce.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradreduce.accumulator.checkpoint import sum_of_weights
from gradreduce.accumulator.sparse_storage import SPARSE
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import (
    StateEntry,
    StateTable,
    array,
    attribute,
    by_name,
    constant,
    flag,
    integer,
    load_all,
    optional,
    queue_copy,
    some_of,
    upload_like,
    validate_state,
    values_of,
)
from gradreduce.errors import brief, listed
from gradreduce.optim.checkpoint import slots_table
from gradreduce.optim.slots import Slots
from gradreduce.weights import parts_of

from .rounds import Progress
from .sums import Sum
from .worker import Worker

_CENTER, _WORKER = "gradreduce AGN center 2", "gradreduce AGN worker 2"
_NO_SLOTS: Mapping[str, Any] = {"optimizer": None, "slots": {}}


def center_table(
    variables: Mapping[str, Variable], slots: Slots | None, owner: Any = None
) -> StateTable:
    """Returns the table of a center.

    Args:
        variables: its variables by name.
        slots: its slots; None before an ``AGNOptimizer`` is created.
        owner: the object with the attribute ``progress`` of a center with a rule.
    """
    if slots is None:
        optimizer = constant(None)
    else:
        own = slots_table(slots, by_name(variables.values()))
        optimizer = StateEntry(own.save, optional(own), lambda saved: own.ready(saved or _NO_SLOTS))
    table = {"variables": values_of(variables), "optimizer": optimizer}
    if owner is not None:
        table["progress"] = progress_entry(owner)
    return StateTable(format=constant(_CENTER), **table)


def progress_entry(owner: Any) -> StateEntry:
    """Returns the entry of what a center with a rule has applied."""
    counts = {name: integer(0) for name in ("num_pushes", "num_updates")}
    schema = {**counts, "weight": partial(sum_of_weights, False)}

    def save() -> dict[str, Any]:
        progress = owner.progress
        counts = {"num_pushes": progress.num_pushes, "num_updates": progress.num_updates}
        return {**counts, "weight": parts_of(progress.weight)}

    return StateEntry(
        save, schema, lambda saved: partial(setattr, owner, "progress", Progress(**saved))
    )


def ready_center(
    variables: Mapping[str, Variable], slots: Slots | None, state: Any, owner: Any = None
) -> Callable[[], None]:
    """Validates a center's state and allocates memory; returns a function that loads it."""
    if slots is None and isinstance(state, Mapping) and state.get("optimizer") is not None:
        raise ValueError("state['optimizer'] has slots; create the workers' AGNOptimizers first")
    table = center_table(variables, slots, owner)
    return table.ready(validate_state("state", state, table))


def worker_table(worker: Worker, *, has_weight: bool) -> StateTable:
    """Returns the table of a worker.

    Args:
        worker: the worker.
        has_weight: whether the state has the sum of the weights of the steps since the last push.
            Otherwise all of them are 1.
    """
    shared = worker.variables
    weight = StateEntry(lambda: parts_of(shared.weight()), partial(sum_of_weights, False))
    pulled_at = attribute(shared, "pulled_at", integer(0))
    variables = by_name(shared.centers)
    return StateTable(
        format=constant(_WORKER),
        optimizer=worker.inner._state_table(variables),
        variables=values_of(variables),
        sums=StateEntry(
            lambda: {
                var.name: queue_copy(total[0]) if isinstance(total, tuple) else SPARSE.save(total)
                for var, total in shared.sums.items()
            },
            some_of({name: partial(_ready_sum, var) for name, var in variables.items()}),
            lambda uploads: partial(
                setattr,
                shared,
                "sums",
                {variables[name]: upload() for name, upload in uploads.items()},
            ),
        ),
        pulled=StateEntry(
            lambda: {var.name: queue_copy(kept) for var, kept in shared.pulled.items()},
            some_of({name: array(var.shape, var.dtype) for name, var in variables.items()}),
            lambda arrays: partial(
                setattr,
                shared,
                "pulled",
                {
                    variables[name]: upload_like(
                        each, variables[name], worker.pulled_dtype(variables[name])
                    )
                    for name, each in arrays.items()
                },
            ),
        ),
        **({"pulled_at": pulled_at} if worker.has_rule else {}),
        local_step=attribute(shared, "num_steps", integer(0, 2**31 - 1)),
        **({"weight": weight} if has_weight else {}),
        is_due=attribute(worker, "push_pending", flag),
    )


def load_worker(worker: Worker, state: Any) -> None:
    """Validates and restores a worker's state; see ``AGNOptimizer.load_state_dict``."""
    has_weight = isinstance(state, Mapping) and "weight" in state
    table = worker_table(worker, has_weight=has_weight)
    values = validate_state("state", state, table)
    unknown = sorted(values["sums"].keys() - values["pulled"].keys())
    if unknown and worker.config.gamma is not None:
        raise ValueError(
            f"state['pulled'] has no [{listed(map(repr, unknown))}], but state has sums of them; "
            "it was saved by a worker without distance_scale"
        )
    if values["is_due"] and not values["sums"]:
        raise ValueError("state['is_due'] is true, but there are no sums to push")
    if has_weight and bool(values["weight"]) is not bool(values["sums"]):
        raise ValueError(
            f"state['weight'] is {brief(state['weight'])}, but state['sums'] has "
            f"{len(values['sums'])} sums; the first is empty if there are none"
        )
    if has_weight:
        count, excess = 0, values["weight"]
    else:
        period = worker.period
        count, excess = (values["local_step"] % period or period) if values["sums"] else 0, 0
    load_all(
        [table.ready(values), partial(vars(worker.variables).update, count=count, excess=excess)]
    )


def _ready_sum(var: Variable, where: str, saved: Any) -> Callable[[], Sum]:
    """Validates a saved sum, an array or a dict of rows; returns a function that uploads it."""
    if isinstance(saved, Mapping):  # any count is allowed: pushes do not use counts
        load = SPARSE.load(where, saved, var.dtype, var.shape, 2**63 - 1)
        return partial(load, var.devices[0])
    host = array(var.shape, var.dtype)(where, saved)
    return lambda: tuple([device.upload(host) for device in var.devices])
