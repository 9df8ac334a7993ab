"""Kills child processes that write snapshots: ``python snapshot_program.py MODULE FOLDER``.

Prints how often a child was killed at a line of the module, and at a random moment.
"""

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

PATH, FOLDER = sys.argv[1:]
spec = importlib.util.spec_from_file_location("snapshots_without_ray", PATH)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def state(number: int) -> dict[str, Any]:
    return {"n": number, "w": np.full(100_000, number, np.float32)}


def killed_by(write: Callable[[], None]) -> int:
    """The signal that ends a child which writes; 0 if none does."""
    child = os.fork()
    if not child:
        write()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def check(*wanted: int) -> int:
    """Checks that the newest snapshot is whole and one of these, if any; returns its number."""
    snapshots = module.Snapshots(FOLDER, "a")
    numbers = snapshots.numbers()
    left = {path.name for path in Path(FOLDER).iterdir()}
    assert left == {f"a.{number}.snapshot" for number in numbers}, left  # none is damaged
    newest: int = numbers[-1]
    assert len(numbers) >= 2
    assert newest in wanted or not wanted, (numbers, wanted)
    found = snapshots.read(newest)
    assert found["n"] == newest
    assert (found["w"] == newest).all()
    return newest


def kill_at_line(number: int, last: int) -> None:
    """Writes a snapshot, and ends this process at the so-manieth line of the module."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != PATH:
            return None
        num_lines += event == "line"
        if num_lines == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    snapshots = module.Snapshots(FOLDER, "a")
    sys.settrace(trace)
    snapshots.write(number, state(number))


def write_until_killed(number: int, seconds: float) -> None:
    """Writes snapshots, until a timer ends this process, which has no handler for its signal."""
    snapshots = module.Snapshots(FOLDER, "a")
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        number += 1
        snapshots.write(number, state(number))


def main() -> None:
    snapshots = module.Snapshots(FOLDER, "a")
    newest, num_lines, ended_by = 1, 0, signal.SIGKILL
    snapshots.write(newest, state(newest))
    while ended_by == signal.SIGKILL:
        newest += 1
        snapshots.write(newest, state(newest))
        num_lines += 1
        ended_by = killed_by(partial(kill_at_line, newest + 1, num_lines))
        newest = check(newest, newest + 1)
    random.seed(0)
    moments = [random.uniform(0.0001, 0.01) for _ in range(20)]
    for seconds in moments:
        assert killed_by(partial(write_until_killed, newest, seconds)) == signal.SIGALRM
        newest = check()
    sys.stdout.write(f"{num_lines - 1} {len(moments)}\n")


if __name__ == "__main__":
    main()
