"""Writes the flight record of this process's groups for PyTorch's analyzer."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gradreduce.comm.torch_flight import GroupRecord, completed_by_any, dump_of
from gradreduce.device import replace_file, run_in_thread
from gradreduce.errors import log_warning

VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
_WRITE_SECONDS = 2.0  # a hanging file system must not delay an error


def write_dumps(
    prefix: str, groups: Sequence[GroupRecord], failed: GroupRecord, began: float
) -> None:
    """Writes the dump of this process, and those of processes of its group that have none.

    A process that hangs or has ended writes no dump, and the analyzer needs those of all. A process
    that fails later replaces its dump. A failure to write is logged.

    Args:
        prefix: the path of each file, but for the rank at its end.
        groups: all groups of this process.
        failed: the group that has failed.
        began: when the group was made, in seconds since 1970; older files are of another run.
    """
    own = failed.ranks[failed.record["process"]]
    joined = failed._replace(record=completed_by_any([failed.record]))

    def write() -> None:
        try:
            replace_file(Path(f"{prefix}{own}"), pickle.dumps(dump_of(groups)), mode=0o666)
            for rank in failed.ranks:
                _write_if_missing(Path(f"{prefix}{rank}"), pickle.dumps(dump_of([joined])), began)
        except OSError as error:
            log_warning(__name__, "%s=%s: nothing was written: %s", VARIABLE, prefix, error)

    run_in_thread(write).wait(_WRITE_SECONDS)


def _write_if_missing(path: Path, content: bytes, began: float) -> None:
    """Writes a file that is not there, or replaces one of another run."""
    with suppress(FileNotFoundError):
        if path.stat().st_mtime < began:
            path.unlink()
    with suppress(FileExistsError), path.open("xb") as file:
        file.write(content)
