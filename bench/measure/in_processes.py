"""Calls a function in processes of its own, and gets the figures that it returns.

The processes run this program, which finds the function by its name and writes its result.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradreduce as gr

__all__ = ["figures_of", "torchrun", "words_of"]

SOURCES = Path(gr.__file__).resolve().parents[1], Path(__file__).resolve().parents[1]


def figures_of(
    function: str,
    *arguments: Any,
    launcher: Sequence[str] = (sys.executable,),
    seconds: float | None = None,
    **environment: str,
) -> Any:
    """Returns what a function returns in another process, or in the first of several.

    Args:
        function: ``module:function``. Of several processes, all but one return None.
        arguments: of the function, as JSON can write them.
        launcher: the command of a Python program, such as ``torchrun(2)``.
        seconds: the time for all of it.
        environment: variables to add to the environment.

    Raises:
        subprocess.SubprocessError: a process has failed, or they did not end in time.
    """
    path = os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "figures.json"
        subprocess.run(
            [*launcher, *words_of(report, function, *arguments)], timeout=seconds, check=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip
        return json.loads(report.read_text(encoding="utf-8"))


def words_of(report: Path, function: str, *arguments: Any) -> tuple[str, ...]:
    """Returns what comes after Python in the command that calls a function.

    Args:
        report: the file for its result.
        function: see ``figures_of``.
        arguments: as well.
    """
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
