"""Converts the flight records of several processes for PyTorch's analyzer, ``fr_trace``.

    python tools/flight_to_torch.py FOLDER flight.*.rank*.json
    python -m torch.distributed.flight_recorder.fr_trace FOLDER

The files are the flight records of one mesh, which ``GRADREDUCE_FLIGHT_RECORD`` names. A process
that was killed or stopped has no file; the tool assumes that it joined the calls that another
process has completed. IndexedSlices have the size of one row.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_VERSION = "2.10"  # of the format
_GROUP = ("0", "gradreduce")  # name and description
# The analyzer knows its own names only. Every other call reduces.
_NAMES = {"broadcast": "nccl:broadcast", "a SyncStep": "nccl:barrier"}


def convert(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the dump of PyTorch's recorder for each process.

    Args:
        records: at most one of each process.

    Raises:
        ValueError: they are not of several processes of one mesh.
    """
    if any("process" not in each for each in records):
        raise ValueError("a mesh that is not open in several processes has written a file")
    of_process = {each["process"]: _entries(each) for each in records}
    num_processes = records[0]["num_processes"]
    is_one_mesh = all(each["num_processes"] == num_processes for each in records)
    if not is_one_mesh or len(of_process) != len(records):
        raise ValueError("the files must be of one mesh, and of another process each")
    completed = {
        entry["record_id"]: entry
        for entries in of_process.values()
        for entry in entries
        if entry["retired"]
    }
    joined = [completed[number] for number in sorted(completed)]
    ranks = list(range(num_processes))
    name, text = _GROUP
    config = {name: {"name": name, "desc": text, "ranks": str(ranks)}}
    return {
        rank: {
            "version": _VERSION,
            "pg_config": config,
            "pg_status": {name: _status(entries)},
            "entries": entries,
        }
        for rank, entries in ((rank, of_process.get(rank, joined)) for rank in ranks)
    }


def _entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns an entry for each call of one process."""
    return [
        _entry(call["number"], record["descriptions"][call["digest"]], done=call["done"])
        for call in record["calls"]
    ]


def _entry(number: int, description: dict[str, Any], *, done: bool) -> dict[str, Any]:
    """Returns the entry of one call, whose results have the sizes of its tensors."""
    # A SyncStep lists the indices of its variables: it is a collective without tensors.
    found = [re.match(r"(\w+).*?\[(.*?)\]", str(each)) for each in description["tensors"]]
    dtypes = [each[1] for each in found if each]
    sizes = [[int(extent) for extent in re.findall(r"\d+", each[2])] for each in found if each]
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": _GROUP,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": _NAMES.get(description["call"], "nccl:all_reduce"),
        "state": "completed" if done else "started",
        "retired": done,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "frames": [],
        "time_created_ns": 0,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 0,
    }


def _status(entries: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Returns the number of the last call that was made, and of the last that was completed."""
    made = max([each["record_id"] for each in entries], default=-1)
    completed = max([each["record_id"] for each in entries if each["retired"]], default=-1)
    return {
        "last_enqueued_collective": made,
        "last_started_collective": made,
        "last_completed_collective": completed,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the files and writes one of each process to the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="is created; fr_trace reads it")
    parser.add_argument("files", type=Path, nargs="+", help="flight records, one of each process")
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text()) for path in options.files]
    try:
        dumps = convert(records)
    except ValueError as error:
        parser.error(str(error))
    options.folder.mkdir()
    for rank, dump in dumps.items():
        (options.folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    missing = sorted(dumps.keys() - {each["process"] for each in records})
    if missing:
        print(f"no file of process {', '.join(map(str, missing))}: taken to have joined the calls "
              "that another process has completed")  # fmt: skip


if __name__ == "__main__":
    main()
