"""Saves the state of a ``SyncStep`` to host memory, and validates and loads it.

It has the variables, and the states of the optimizer and of the accumulators, all by the names of
the variables. Every process gets and loads the same state. Slots and variables are alike in all
processes; only the partial sums of an unfinished update differ, and are gathered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gradreduce import step_scaling
from gradreduce.accumulator import ConditionalAccumulator
from gradreduce.accumulator import checkpoint as accumulator_checkpoint
from gradreduce.accumulator.validate import as_required
from gradreduce.arrays import snapshots
from gradreduce.arrays.convert import host_array, is_array
from gradreduce.arrays.variable import Variable
from gradreduce.device import Device
from gradreduce.device.exchange import agreed, exchange_all, exchange_numbers
from gradreduce.device.process_group import Description, digest_of
from gradreduce.errors import about
from gradreduce.optim import Optimizer
from gradreduce.optim.agn.checkpoint import assign, checked_values, placed
from gradreduce.optim.checkpoint import by_name
from gradreduce.optim.checkpoint import ready_state as optimizer_state
from gradreduce.step_scaling import GradientScaling
from gradreduce.step_shards import OptimizerShards

_FORMAT = "gradreduce SyncStep 1"
_KEYS = (
    "format", "num_replicas", "num_required", "variables", "optimizer", "accumulators",
    *step_scaling.KEYS,
)  # fmt: skip
# What an accumulator counts in its own process; each call adds one for each of its replicas.
_COUNTS = ("num_accumulated", "num_dropped")


class StepParts(NamedTuple):
    """What a ``SyncStep`` consists of; see there.

    Attributes:
        variables: of the step.
        accumulators: one for each variable.
        optimizer: that has slots of these variables.
        devices: of this process.
        num_replicas: of all processes.
        shards: of a sharded optimizer; else None.
        scaling: of the mean gradients.
    """

    variables: Sequence[Variable]
    accumulators: Sequence[ConditionalAccumulator]
    optimizer: Optimizer
    devices: Sequence[Device]
    num_replicas: int
    shards: OptimizerShards | None
    scaling: GradientScaling


def saved_state(step: StepParts, num_required: int) -> dict[str, Any]:
    """Returns a snapshot of the state; see ``SyncStep.state_dict``."""
    owners = by_name(step.variables)
    copies = {name: snapshots.copied(var.buffers[0]) for name, var in owners.items()}
    accumulators = {}
    for name, accumulator in zip(owners, step.accumulators, strict=True):
        saved = accumulators[name] = accumulator.state_dict()
        for key in _COUNTS:
            saved[key] = saved[key] * step.num_replicas // len(step.devices)
    counts = [(each["global_step"], each["num_accumulated"]) for each in accumulators.values()]
    _check_alike(step, "SyncStep.state_dict", {"accumulators": counts})
    for saved in accumulators.values():
        saved["partial_sums"] = _of_all_replicas(step, saved["partial_sums"])
    return {
        "format": _FORMAT,
        "num_replicas": step.num_replicas,
        "num_required": num_required,
        "variables": snapshots.downloaded(copies, None),
        "optimizer": (step.shards or step.optimizer).state_dict(),
        "accumulators": accumulators,
        **step.scaling.state_dict(),
    }


def _of_all_replicas(step: StepParts, sums: list[Any]) -> list[Any]:
    """Returns the partial sums of the replicas of all processes."""
    leader = step.devices[0]
    group = leader.mesh_state.process_group
    if group is None:
        return sums
    if sums[0] is None:
        return [None] * step.num_replicas
    own = [leader.upload(each) for each in sums]
    shapes = [[own[0].shape] * count for count in group.counts]
    what = {"call": "SyncStep.state_dict", "tensors": [list(own[0].shape)]}
    with agreed(leader, Description.of(what)):
        return [buffer.numpy() for buffer in exchange_all(leader, own, shapes)]


def ready_state(step: StepParts, state: Any) -> Callable[[], int]:
    """Validates a state and allocates memory; the returned function loads it.

    That returns the saved ``num_required``.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value of another type.
        ValueError: a value of another format, shape or dtype, another state than another process
            has, or gradients of an unfinished update of another number of replicas.
    """
    snapshots.check_keys("state", state, _KEYS)
    snapshots.check_entry(state, "format", _FORMAT)
    _check_alike(step, "SyncStep.load_state_dict", {key: state[key] for key in _KEYS})
    num_replicas = snapshots.plain(state["num_replicas"])
    num_required = as_required(snapshots.plain(state["num_required"]))
    owners = by_name(step.variables)
    values = checked_values("state['variables']", state["variables"], owners)
    snapshots.check_keys("state['accumulators']", state["accumulators"], list(owners))
    for name, saved in state["accumulators"].items():
        snapshots.check_keys(f"state['accumulators'][{name!r}]", saved, accumulator_checkpoint.KEYS)
    slots, start = step.optimizer._slots, step.optimizer._slot_start
    where = "state['optimizer']"
    try:
        if step.shards is not None:
            loads = [step.shards.ready_state(state["optimizer"])]
        else:
            loads = [optimizer_state(slots, step.variables, state["optimizer"], start)]
        for name, accumulator in zip(owners, step.accumulators, strict=True):
            where = f"state['accumulators'][{name!r}]"
            own = _of_own_replicas(step, state["accumulators"][name], num_replicas)
            loads.append(accumulator_checkpoint.ready_state(accumulator.accumulator_ref, own))
    except (TypeError, ValueError) as error:
        raise about(where, error) from None
    continues = any(each["num_accumulated"] for each in state["accumulators"].values())
    loads.append(step.scaling.ready_state(state, continues=continues))
    buffers = placed(values, owners)

    def load() -> int:
        assign(buffers, owners)
        for load_one in loads:
            load_one()
        return num_required

    return load


def _of_own_replicas(step: StepParts, saved: Mapping[str, Any], before: Any) -> dict[str, Any]:
    """Returns the part of an accumulator's state that this process loads.

    Args:
        step: to load.
        saved: the state of all processes.
        before: the number of replicas when it was saved.
    """
    here, everywhere = len(step.devices), step.num_replicas
    count, dropped = (
        accumulator_checkpoint.integer(key, snapshots.plain(saved[key]), least=0) for key in _COUNTS
    )
    sums = saved["partial_sums"]
    if isinstance(sums, list | tuple):
        if len(sums) != before:
            raise ValueError(
                f"state['partial_sums'] has {len(sums)} entries; state['num_replicas'] is {before}"
            )
        if count and (before != everywhere or count * here % everywhere):
            raise ValueError(
                f"state['num_accumulated']={count} gradients of {before} replicas wait for an "
                f"update, which {everywhere} replicas cannot continue; save a state when the step "
                "has returned True"
            )
        group = step.devices[0].mesh_state.process_group
        first = 0 if group is None else sum(group.counts[: group.rank])
        sums = sums[first : first + here] if before == everywhere else [None] * here
    return {
        **saved,
        "num_accumulated": count * here // everywhere,
        "num_dropped": dropped // everywhere * here,  # whole calls, so that processes agree
        "partial_sums": sums,
    }


def _check_alike(step: StepParts, call: str, values: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` in all processes unless these entries of a state are equal in all."""
    leader = step.devices[0]
    group = leader.mesh_state.process_group
    if group is None:
        return
    texts = [json.dumps(value, default=_as_json) for value in values.values()]
    digests = [int(digest_of(text.encode()), 16) for text in texts]
    with agreed(leader, Description.of({"call": call, "tensors": []})):
        found = exchange_numbers(leader, digests, [len(digests)] * group.size)
    for rank, theirs in enumerate(found):
        for key, one, other in zip(values, found[0], theirs, strict=True):
            if one != other:
                raise ValueError(f"{call}: state[{key!r}] differs between processes 0 and {rank}")


def _as_json(value: Any) -> Any:
    """Returns what stands for an array, or for another mapping than a dict, in JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    value = snapshots.plain(value)
    if not is_array(value):
        return value if isinstance(value, str | int | float) else repr(value)
    array = host_array(value)
    return [str(array.dtype), array.shape, digest_of(array.tobytes())]
