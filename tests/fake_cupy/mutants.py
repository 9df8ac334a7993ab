"""Faults planted in our own source, each in a process of its own, and what finds them.

``python -m fake_cupy.mutants`` prints one JSON object: what was planted -> how it ended.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Imported once, before the forks.
import ml_dtypes  # noqa: F401
import numpy as np  # noqa: F401
import pytest  # noqa: F401

from .planted import FAULTS

__all__ = ["run_all"]

SEEDS = (*range(2, 26), 0, 1)  # the rarest fault shows under every third
NUM_STEPS = 60
SURVIVED = "survived"


def run_all(names: Sequence[str], num_processes: int = 2) -> dict[str, str]:
    """Each fault in a forked process; its first message, or ``SURVIVED``."""
    outcomes: dict[str, str] = {}
    running: dict[int, tuple[str, int]] = {}
    waiting = list(names)
    while waiting or running:
        while waiting and len(running) < num_processes:
            name = waiting.pop(0)
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _child(name, writing)
            os.close(writing)
            running[child] = (name, reading)
        child, _ = os.wait()
        if child in running:
            name, reading = running.pop(child)
            with os.fdopen(reading, encoding="utf-8") as said:
                outcomes[name] = said.read() or "the process died"
    return outcomes


def _child(name: str, writing: int) -> None:
    """Never returns. The message must fit a pipe's buffer, because nobody reads before the end."""
    try:
        outcome = _outcome(name)
    except BaseException as error:
        outcome = f"broken: {type(error).__name__}: {error}"
    with os.fdopen(writing, "w", encoding="utf-8") as said:
        said.write(outcome[:2000])
    os._exit(0)


def _outcome(name: str) -> str:
    _plant(FAULTS[name].changes)
    from . import hang, lending, programs
    from .machine import current
    from .plugin import declare_launches

    _plant_kernels(FAULTS[name].changes)

    declare_launches()
    run = hang.run if FAULTS[name].hangs else programs.run
    run = lending.run if FAULTS[name].lends else run
    for turn, seed in enumerate(SEEDS):
        try:
            run(seed, NUM_STEPS)
        except Exception as error:
            faults = current().faults
            text = faults[0] if faults else f"{type(error).__name__}: {error}"
            return f"seed {turn + 1}: {text}"
        if current().faults:
            return f"seed {turn + 1}: {current().faults[0]}"
    return SURVIVED


def _plant(changes: Sequence[tuple[str, str, str]]) -> None:
    """Changes the texts of modules that are not imported yet.

    Raises:
        ValueError: a text is not there exactly once: the source has changed, the fault must too.
    """
    assert not any(module.startswith("gradreduce") for module in sys.modules)
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, fullname):
        if any(where == fullname for where, _, _ in changes):
            text = _changed(Path(self.path).read_text(encoding="utf-8"), fullname, changes)
            return compile(text, self.path, "exec", dont_inherit=True)
        return original(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]


def _plant_kernels(changes: Sequence[tuple[str, str, str]]) -> None:
    from gradreduce.device import cuda_compile, kernel

    places = {where for where, _, _ in changes if where.startswith("kernels/")}

    def kernel_text(stem: str) -> str:
        text = kernel.kernel_text(stem)
        for where in places:
            if f'#line 1 "{where}"' in text:  # its own, or that of a header
                text = _changed(text, where, changes)
        return text

    cuda_compile.kernel_text = kernel_text


def _changed(text: str, place: str, changes: Sequence[tuple[str, str, str]]) -> str:
    for where, old, new in changes:
        if where == place:
            if text.count(old) != 1:
                raise ValueError(f"{place} holds {text.count(old)} times: {old}")
            text = text.replace(old, new)
    return text


if __name__ == "__main__":
    asked = sys.argv[1:] or list(FAULTS)
    sys.stdout.write(json.dumps(run_all(asked), indent=1) + "\n")
