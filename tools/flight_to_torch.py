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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradreduce.comm.torch_flight import GroupRecord, completed_by_any, dump_of


def convert(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the dump of PyTorch's recorder for each process.

    Args:
        records: at most one of each process.

    Raises:
        ValueError: they are not of several processes of one mesh.
    """
    if any("process" not in each for each in records):
        raise ValueError("a mesh that is not open in several processes has written a file")
    of_process = {each["process"]: each for each in records}
    num_processes = records[0]["num_processes"]
    is_one_mesh = all(each["num_processes"] == num_processes for each in records)
    if not is_one_mesh or len(of_process) != len(records):
        raise ValueError("the files must be of one mesh, and of another process each")
    joined = completed_by_any(records)
    ranks = range(num_processes)
    return {
        rank: dump_of([GroupRecord("0", "gradreduce", ranks, of_process.get(rank, joined))])
        for rank in ranks
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
