"""Saves and loads the accumulators of a ``SyncStep``, whose sums are those of all processes.

Every process gets and loads the same state. Variables and slots are the same in all processes. The
partial sums of an unfinished update differ, so they are gathered from all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from gradreduce import checkpoint
from gradreduce.accumulator import ConditionalAccumulatorBase
from gradreduce.accumulator.checkpoint import ready_state
from gradreduce.arrays.convert import is_array
from gradreduce.comm.description import Description, digest_of
from gradreduce.comm.replicas import Replicas
from gradreduce.device import Device


def save_accumulators(
    accumulators: Mapping[str, ConditionalAccumulatorBase],
    devices: Sequence[Device],
    num_replicas: int,
) -> dict[str, dict[str, Any]]:
    """Returns the states of accumulators, with the counts and sums of all processes.

    Args:
        accumulators: by the names of their variables.
        devices: the devices of this process.
        num_replicas: the number of replicas in all processes.
    """
    states = {name: each.state_dict() for name, each in accumulators.items()}
    for saved in states.values():
        # Each call adds one gradient for each replica, so the counts of all processes are known.
        for key in ("num_accumulated", "num_dropped"):
            saved[key] = saved[key] * num_replicas // len(devices)
    counts = [(each["global_step"], each["num_accumulated"]) for each in states.values()]
    check_alike(devices[0], "SyncStep.state_dict", {"accumulators": counts})
    for saved in states.values():
        saved["partial_sums"] = _of_all_replicas(devices, saved["partial_sums"])
    return states


def _of_all_replicas(devices: Sequence[Device], sums: list[Any]) -> list[Any]:
    """Returns the partial sums of the replicas of all processes."""
    replicas = Replicas(devices)
    counts = replicas.counts
    if len(counts) == 1:  # one process: a replica may have a sum alone, see gr.replica
        return sums
    if sums[0] is None:
        return [None] * sum(counts)
    if not isinstance(sums[0], Mapping):
        return _exchange_sums(replicas, sums, [sums[0].shape] * sum(counts))
    # The rows of sparse gradients, whose numbers differ between the replicas.
    with replicas.call(Description.of({"call": "SyncStep.state_dict", "tensors": []})):
        of_processes = replicas.exchange_numbers([len(each["indices"]) for each in sums], counts)
    num_rows = [number for numbers in of_processes for number in numbers]
    columns = []
    for key in sums[0]:
        row = sums[0][key].shape[1:]
        shapes = [(number, *row) for number in num_rows]
        columns.append(_exchange_sums(replicas, [each[key] for each in sums], shapes))
    return [dict(zip(sums[0], each, strict=True)) for each in zip(*columns, strict=True)]


def _exchange_sums(
    replicas: Replicas, sums: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Returns one array of each replica of all processes; ``shapes`` are those of all replicas."""
    ends = list(accumulate(replicas.counts, initial=0))
    by_process = [shapes[start:stop] for start, stop in pairwise(ends)]
    what = {"call": "SyncStep.state_dict", "tensors": [list(each) for each in shapes]}
    with replicas.call(Description.of(what)):
        return replicas.exchange_arrays(sums, by_process)


def ready_accumulators(
    accumulators: Sequence[ConditionalAccumulatorBase],
    saved: Mapping[str, Any],
    devices: Sequence[Device],
    num_replicas: int,
    before: int,
) -> list[Callable[[], None]]:
    """Validates ``save_accumulators``; returns functions that load the sums of this process.

    Args:
        accumulators: in the order of ``saved``.
        saved: the states.
        devices: the devices of this process.
        num_replicas: the number of replicas in all processes.
        before: the number of replicas when the state was saved.

    Raises:
        KeyError: a key is missing or unknown.
        TypeError: a value has a wrong type.
        ValueError: a value has another format, shape or dtype; or another number of replicas added
            gradients that wait for an update.
    """
    replicas = before, partial(_of_own_replicas, devices, num_replicas, before)
    return [
        ready_state(each.accumulator_ref, state, f"state['accumulators'][{name!r}]", replicas)
        for each, (name, state) in zip(accumulators, saved.items(), strict=True)
    ]


def _of_own_replicas(
    devices: Sequence[Device], num_replicas: int, before: int, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the part of an accumulator's state that this process loads.

    Args:
        devices: see ``ready_accumulators``.
        num_replicas: see ``ready_accumulators``.
        before: see ``ready_accumulators``.
        saved: the validated state of the accumulator, for all processes.
    """
    here, everywhere, count = len(devices), num_replicas, saved["num_accumulated"]
    if count and (before != everywhere or count * here % everywhere):
        raise ValueError(
            f"the state has {count} gradients of {before} replicas that wait for an update, and "
            f"{everywhere} replicas cannot continue it: use {before} replicas, or load a state "
            "that was saved right after the step returned True"
        )
    first = Replicas(devices).first
    sums = saved["partial_sums"][first : first + here] if count else [None] * here
    return {
        **saved,
        "num_accumulated": count * here // everywhere,
        "num_dropped": saved["num_dropped"] // everywhere * here,  # rounded down to whole calls
        "partial_sums": sums,
    }


def check_alike(device: Device, call: str, values: Mapping[str, Any]) -> None:
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
