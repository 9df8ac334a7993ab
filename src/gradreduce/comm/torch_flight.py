"""Converts flight records of processes into the form of PyTorch's flight recorder.

``tools/flight_to_torch.py`` does this with files, and the backend of ``gr.torch`` when a group
fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_VERSION = "2.10"  # of the format
# PyTorch's analyzer knows the names of torch.distributed only, which calls with ``sizes`` have. The
# other calls of a mesh are reductions.
_NAMES = {"a SyncStep": "barrier", "broadcast": "broadcast"}


class GroupRecord(NamedTuple):
    """The calls of a process in one group.

    Attributes:
        name: the name of the group, equal in its processes.
        text: more about the group, for readers.
        ranks: the rank of each process of the group in the whole job, in order.
        record: the result of ``Processes.flight_record``.
    """

    name: str
    text: str
    ranks: Sequence[int]
    record: Mapping[str, Any]


def dump_of(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Returns the dump of one process: dicts, lists, strings and numbers.

    Args:
        groups: the groups of the process.
    """
    calls = sorted(
        [
            (call.get("time_ns", 0), group, call)
            for group in groups
            for call in group.record["calls"]
        ],
        key=lambda each: (each[0], each[2]["number"]),
    )
    # All processes count from the same call, although old calls are dropped.
    first = sum(group.record["calls"][0]["number"] for group in groups if group.record["calls"])
    entries = [
        _entry(group, call, record_id) for record_id, (_, group, call) in enumerate(calls, first)
    ]
    return {
        "version": _VERSION,
        "pg_config": {
            group.name: {"name": group.name, "desc": group.text, "ranks": str([*group.ranks])}
            for group in groups
        },
        "pg_status": {group.name: _status(group.record["calls"]) for group in groups},
        "entries": entries,
    }


def completed_by_any(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the record of a process that cannot write its own.

    It is taken to have joined the calls that another process has completed.

    Args:
        records: records of processes of its group.
    """
    done = {call["number"]: call for record in records for call in record["calls"] if call["done"]}
    descriptions = {}
    for record in records:
        descriptions.update(record["descriptions"])
    return {"calls": [done[number] for number in sorted(done)], "descriptions": descriptions}


def _entry(group: GroupRecord, call: Mapping[str, Any], record_id: int) -> dict[str, Any]:
    """Returns the entry of a call."""
    description = group.record["descriptions"][call["digest"]]
    name = description["call"]
    if "sizes" in description:
        inputs, outputs = description["sizes"]
    else:  # the results have the sizes of the tensors
        name, inputs, outputs = _NAMES.get(name, "all_reduce"), *[description["tensors"]] * 2
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": (group.name, group.text),
        "collective_seq_id": call["number"],
        "p2p_seq_id": 0,
        "op_id": call["number"],
        "is_p2p": False,
        "profiling_name": f"nccl:{name}",
        "state": "completed" if call["done"] else "started",
        "retired": call["done"],
        **_sizes("input", inputs),
        **_sizes("output", outputs),
        "frames": [],
        "time_created_ns": call.get("time_ns", 0),
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 0,
    }


def _sizes(side: str, tensors: Sequence[object]) -> dict[str, Any]:
    """Returns sizes and dtypes of tensors such as ``"float32[2, 3]"``."""
    # A SyncStep lists the indices of its variables: it is a collective without tensors.
    found = [re.match(r"(\w+).*?\[(.*?)\]", str(each)) for each in tensors]
    return {
        f"{side}_sizes": [[*map(int, re.findall(r"\d+", each[2]))] for each in found if each],
        f"{side}_dtypes": [each[1] for each in found if each],
    }


def _status(calls: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of the last call that was made, and of the last that was completed."""
    made = max([each["number"] for each in calls], default=-1)
    completed = max([each["number"] for each in calls if each["done"]], default=-1)
    return {
        "last_enqueued_collective": made,
        "last_started_collective": made,
        "last_completed_collective": completed,
    }
