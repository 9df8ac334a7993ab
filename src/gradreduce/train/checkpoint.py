"""Saves, validates and loads the state of a ``SyncStep``.

The state has the variables, the optimizer and the accumulators, all by the names of the variables.
Every process gets and loads the same state. Variables and slots are the same in all processes. The
partial sums of an unfinished update differ, so they are gathered from all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gradreduce import checkpoint
from gradreduce.accumulator import ConditionalAccumulator
from gradreduce.accumulator import checkpoint as accumulator_checkpoint
from gradreduce.arrays.convert import is_array
from gradreduce.arrays.variable import Variable
from gradreduce.checkpoint import anything, equal, integer
from gradreduce.comm.description import Description, digest_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Device
from gradreduce.errors import NotCopied
from gradreduce.optim import Optimizer

from .scaling import SCHEMA, GradientScaling
from .shards import OptimizerShards

_FORMAT = "gradreduce SyncStep 2"


class StepParts(NotCopied):
    """The parts of a ``SyncStep`` that its state depends on.

    Attributes:
        variables: the variables of the step.
        accumulators: one for each variable.
        optimizer: the optimizer, with slots of these variables.
        devices: the devices of this process.
        num_replicas: the number of replicas in all processes.
        num_required: the number of gradients that an update needs.
    """

    variables: tuple[Variable, ...]
    accumulators: Sequence[ConditionalAccumulator]
    optimizer: Optimizer
    devices: tuple[Device, ...]
    num_replicas: int
    num_required: int
    _shards: OptimizerShards | None = None  # if ``shard_optimizer`` is True
    _scaling: GradientScaling  # scales the mean gradients


def save_state(step: StepParts, output_type: str) -> dict[str, Any]:
    """Returns a snapshot of the state; see ``SyncStep.state_dict``."""
    download = checkpoint.downloader(None, output_type)
    owners = checkpoint.by_name(step.variables)
    copies = checkpoint.queue_copies(owners)
    accumulators = {}
    for name, accumulator in zip(owners, step.accumulators, strict=True):
        saved = accumulators[name] = accumulator.state_dict()
        # Each call adds one gradient for each replica, so the counts of all processes are known.
        for key in ("num_accumulated", "num_dropped"):
            saved[key] = saved[key] * step.num_replicas // len(step.devices)
    counts = [(each["global_step"], each["num_accumulated"]) for each in accumulators.values()]
    _check_alike(step.devices[0], "SyncStep.state_dict", {"accumulators": counts})
    for saved in accumulators.values():
        saved["partial_sums"] = _of_all_replicas(step.devices, saved["partial_sums"])
    slots = step._shards.save_slots() if step._shards else None
    return download(
        {
            "format": _FORMAT,
            "num_replicas": step.num_replicas,
            "num_required": step.num_required,
            "variables": copies,
            "optimizer": step.optimizer._queue_state(slots),
            "accumulators": accumulators,
            **step._scaling.state_dict(),
        }
    )


def _of_all_replicas(devices: Sequence[Device], sums: list[Any]) -> list[Any]:
    """Returns the partial sums of the replicas of all processes."""
    replicas = Replicas(devices)
    counts = replicas.counts
    if len(counts) == 1:  # one process: a replica may have a sum alone, see gr.replica
        return sums
    if sums[0] is None:
        return [None] * sum(counts)
    shape = sums[0].shape
    shapes = [[shape] * count for count in counts]
    what = {"call": "SyncStep.state_dict", "tensors": [list(shape)]}
    with replicas.call(Description.of(what)):
        return replicas.exchange_arrays(sums, shapes)


def ready_state(step: StepParts, state: Any) -> list[Callable[[], None]]:
    """Validates a state and allocates memory; returns functions that load it.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value has a wrong type.
        ValueError: a value has another format, shape or dtype; processes have different states; or
            the state has gradients that another number of replicas added.
    """
    owners = checkpoint.by_name(step.variables)
    schema = {
        "format": equal(_FORMAT),
        "num_replicas": integer(1),
        "num_required": integer(1),
        "variables": checkpoint.arrays_of(owners),
        "optimizer": anything,
        "accumulators": dict.fromkeys(owners, anything),
        **SCHEMA,
    }
    entries = state if isinstance(state, Mapping) else {}
    values = {key: entries.get(key) for key in schema}
    _check_alike(step.devices[0], "SyncStep.load_state_dict", values)
    loaded = checkpoint.validate_state("state", state, schema)
    checkpoint.check_order("state['variables']", state["variables"], owners)
    divide = step._shards.divide_slots if step._shards else None
    optimizer = loaded["optimizer"], step.variables, "state['optimizer']", divide
    loads = [step.optimizer._ready_state(*optimizer)]
    num_replicas = loaded["num_replicas"]
    replicas = num_replicas, partial(_of_own_replicas, step, num_replicas)
    for accumulator, (name, saved) in zip(
        step.accumulators, loaded["accumulators"].items(), strict=True
    ):
        ready = accumulator_checkpoint.ready_state(
            accumulator.accumulator_ref, saved, f"state['accumulators'][{name!r}]", replicas
        )
        loads.append(ready)
    continues = any(each["num_accumulated"] for each in loaded["accumulators"].values())
    loads.append(step._scaling.ready_state(loaded, continues=continues))
    loads.append(checkpoint.ready_values(loaded["variables"], owners))
    loads.append(partial(setattr, step, "num_required", loaded["num_required"]))
    return loads


def _of_own_replicas(step: StepParts, before: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of an accumulator's state that this process loads.

    Args:
        step: the step that loads the state.
        before: the number of replicas when the state was saved.
        saved: the validated state of the accumulator, for all processes.
    """
    here, everywhere, count = len(step.devices), step.num_replicas, saved["num_accumulated"]
    if count and (before != everywhere or count * here % everywhere):
        raise ValueError(
            f"the state has {count} gradients of {before} replicas that wait for an update, and "
            f"{everywhere} replicas cannot continue it: use {before} replicas, or load a state "
            "that was saved right after the step returned True"
        )
    first = Replicas(step.devices).first
    sums = saved["partial_sums"][first : first + here] if count else [None] * here
    return {
        **saved,
        "num_accumulated": count * here // everywhere,
        "num_dropped": saved["num_dropped"] // everywhere * here,  # rounded down to whole calls
        "partial_sums": sums,
    }


def _check_alike(device: Device, call: str, values: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` in all processes if these entries of a state differ between them."""
    replicas = Replicas([device])
    if replicas.group.size == 1:
        return
    found = replicas.compare_numbers(call, list(map(_digest, values.values())))
    for rank, theirs in enumerate(found):
        for key, one, other in zip(values, found[0], theirs, strict=True):
            if one != other:
                raise ValueError(f"{call}: state[{key!r}] differs between processes 0 and {rank}")


def _digest(value: Any) -> int:
    """Hashes an entry of a state to a number that fits in int64.

    All entries that cannot be read have the same number: their validation raises in every process.
    """
    texts = []

    def add(path: str, leaf: Any) -> None:
        if is_array(leaf):
            array = checkpoint.on_host(path, leaf)
            leaf = array.dtype, array.shape, digest_of(array.tobytes())
        texts.append(f"{path}={leaf!r}")

    try:
        checkpoint.map_leaves(add, value)
    except (TypeError, ValueError):
        texts = ["not readable"]
    return int(digest_of("\n".join(texts).encode()), 16)
