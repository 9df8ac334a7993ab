"""Calls a function in processes of its own, and gets the figures that it returns.

The processes run this program, which finds the function by its name and writes its result.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradreduce as gr

LOOK_SECONDS = 0.02
SOURCES = Path(gr.__file__).resolve().parents[1], Path(__file__).resolve().parents[1]


def figures_of(function: str, *arguments: Any, launcher: Sequence[str] = (sys.executable,),
               seconds: float = 600.0, **environment: str) -> Any:  # fmt: skip
    """Returns what a function returns in another process, or in the first of several.

    ``function`` is ``module:function``, with arguments as JSON can write them; of several
    processes, all but one return None. ``launcher`` is the command of a Python program, such as
    ``torchrun(2)``. Raises a ``SubprocessError`` if a process fails or does not end in time.
    """
    return figures_of_each(function, [arguments], launcher, seconds, [environment])[0]


def figures_of_each(
    function: str, arguments: Sequence[Sequence[Any]], launcher: Sequence[str], seconds: float,
    environments: Sequence[Mapping[str, str]],
) -> list[Any]:  # fmt: skip
    """Calls a function in several processes at once; if one fails, ends the others.

    Each process has its arguments and environment; see ``figures_of``.
    """
    path = os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")])
    end = time.monotonic() + seconds
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{place}.json" for place in range(len(arguments))]
        try:
            for report, words, changed in zip(reports, arguments, environments, strict=True):
                started.append(subprocess.Popen(
                    [*launcher, *words_of(report, function, *words)],
                    env={**os.environ, "PYTHONPATH": path, **changed},
                ))  # fmt: skip
            while None in (states := [one.poll() for one in started]) and not any(states):
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(function, seconds)
                time.sleep(LOOK_SECONDS)
        finally:
            for one in started:
                one.kill()
                one.wait()
        for one in started:
            if one.returncode:
                raise subprocess.CalledProcessError(one.returncode, function)
        return [json.loads(report.read_text(encoding="utf-8")) for report in reports]


def words_of(report: Path, function: str, *arguments: Any) -> tuple[str, ...]:
    """Returns what comes after Python in the command that writes a function's result to a file."""
    return ("-m", "measure.in_processes", str(report), function, json.dumps(arguments))


def torchrun(num_processes: int) -> list[str]:
    """Returns the command that starts Python in processes of PyTorch."""
    words = ["--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, "-m", "torch.distributed.run", *words]


if __name__ == "__main__":
    module, _, name = sys.argv[2].partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[3]))
    if found is not None:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
