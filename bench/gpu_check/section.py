"""Runs the checks of a section one by one, and records each.

A section is a generator: it yields checks and is sent the result of each, on which the next check
may depend. Every check has its own deadline, so that the others have time if one hangs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .child import CommandResult, Stop, run
from .record import FAILED, PASSED, SKIPPED, STOPPED, Record, Result
from .setting import ROOT, Setting, environment

__all__ = [
    "Check", "Checks", "Done", "Limit", "Section", "Verdict", "find_tool", "needing",
    "report_of", "run_section", "scratch", "skipped",
]  # fmt: skip

TAIL_CHARACTERS = 4000
# What a library that is built for CPUs says when it is asked for a GPU.
NO_GPU = {"torch": "Torch not compiled with CUDA enabled", "jax": "Unknown backend: 'gpu'"}
USUAL_FOLDERS = ("usr/local/cuda*/bin", "opt/nvidia/nsight-compute/*")  # of CUDA's tools


def _no_figures(output: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Check:
    """A command to run, with its limits.

    Attributes:
        name: name in the record; checks with the same name are equal.
        command: the program and its arguments.
        seconds: its deadline; the limit of the section applies too.
        environment: variables to add to the environment of all children.
        read: returns its figures, from its output and its files. If this raises, the check fails.
        passes: the exit statuses that are not a failure.
        skips: words in the output of a failed check -> why it cannot run here.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Mapping[str, Any]] = _no_figures
    passes: frozenset[int] = frozenset({0})
    skips: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A result that a section derives from other results."""

    name: str
    outcome: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def skipped(name: str, reason: str) -> Verdict:
    """Returns the result of a check that cannot run here."""
    return Verdict(name, SKIPPED, reason=reason)


Checks = Generator[Check | Verdict, Result, None]
Section = Callable[[Setting], Checks]
Done = MutableMapping[str, tuple[str, Result]]  # check -> the section that ran it, and its result


@dataclass(frozen=True)
class Limit:
    """The time limit of a section.

    Attributes:
        seconds: the limit.
        deadline: its end, by ``time.monotonic``.
    """

    seconds: float
    deadline: float

    @property
    def reason(self) -> str:
        """The reason for ending the section early; empty while there is time."""
        over = time.monotonic() >= self.deadline
        return f"its limit of {self.seconds:g} s" if over else ""


def run_section(
    section: Section, record: Record, setting: Setting, stop: Stop, done: Done | None = None
) -> None:
    """Runs the checks of a section within its time limit.

    Args:
        section: yields the checks.
        record: gets their results.
        setting: has the time limit of all checks together.
        stop: ends the section early.
        done: checks that have run before and are not repeated; those of this section are added.
    """
    done = {} if done is None else done
    limit = Limit(setting.limit, time.monotonic() + setting.limit)
    checks = section(setting)
    try:
        asked = next(checks)
        while True:
            if asked.name in done:
                where, result = done[asked.name]
                _add(record, Result(asked.name, SKIPPED, reason=f"{where} has run it"))
                asked = checks.send(result)
                continue
            result = _perform(asked, record, setting, limit, stop)
            _add(record, result)
            if result.outcome != SKIPPED:
                done[result.name] = record.section, result
            ended = stop.reason or limit.reason
            if ended and result.outcome == STOPPED:
                record.finish(ended)
                return
            asked = checks.send(result)
    except StopIteration:
        record.finish()
    except Exception as error:  # the section's own fault; the next one must not suffer
        _add(record, Result("the section itself", FAILED, reason=repr(error),
                            tail=traceback.format_exc()[-TAIL_CHARACTERS:]))  # fmt: skip
        record.finish()
    finally:
        checks.close()


def _perform(
    asked: Check | Verdict, record: Record, setting: Setting, limit: Limit, stop: Stop
) -> Result:
    if isinstance(asked, Verdict):
        return Result(asked.name, asked.outcome, 0.0, asked.figures, asked.reason)
    record.begin(asked.name)
    ended = run(
        asked.command,
        log=setting.work / f"{record.path.stem}-{len(record.results)}.log",
        cwd=ROOT,
        environment={**environment(fake=setting.fake, work=setting.work), **asked.environment},
        deadline=min(limit.deadline, time.monotonic() + asked.seconds),
        stop=stop,
    )
    if ended.finished:
        return _judged(asked, ended)
    why = stop.reason or limit.reason or f"its deadline of {asked.seconds:g} s"
    return _result(asked, ended, STOPPED, {}, why)


def _judged(asked: Check, ended: CommandResult) -> Result:
    passed = ended.status in asked.passes
    reason = "" if passed else f"exit status {ended.status}"
    figures: Mapping[str, Any] = {}
    try:
        figures = asked.read(ended.output)
    except Exception as error:  # whatever a file that is missing or cut short leads to
        if passed:
            passed, reason = False, f"its figures cannot be read: {error!r}"
    why = [reason for words, reason in asked.skips.items() if words in ended.output]
    if why and not passed:
        return _result(asked, ended, SKIPPED, {}, why[0])
    return _result(asked, ended, PASSED if passed else FAILED, figures, reason)


def _result(
    asked: Check, ended: CommandResult, outcome: str, figures: Mapping[str, Any], reason: str
) -> Result:
    tail = "" if outcome in (PASSED, SKIPPED) else ended.output[-TAIL_CHARACTERS:]
    return Result(asked.name, outcome, round(ended.seconds, 3), figures, reason, tail)


def _add(record: Record, result: Result) -> None:
    """Records a result and prints it, with the end of the output of a failure."""
    record.add(result)
    words = f"{result.name:<50} {result.outcome:<8} {result.seconds:7.1f} s  {result.reason}"
    print(words.rstrip(), flush=True)
    if result.tail:
        print(result.tail, file=sys.stderr, flush=True)


def report_of(path: Path, output: str) -> Mapping[str, Any]:
    """Reads the figures that a program wrote to a JSON file."""
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def needing(library: str, section: Section, name: str) -> Section:
    """Wraps checks that need a library with GPU support; skips them without it."""

    def run(setting: Setting) -> Checks:
        if importlib.util.find_spec(library) is None:
            yield skipped(name, f"not installed: {library}")
            return
        for check in section(setting):
            assert isinstance(check, Check)
            yield replace(check, skips={NO_GPU[library]: f"{library} is built without GPUs"})

    return run


def find_tool(name: str) -> str | None:
    """Returns the path of a CUDA tool, also if it is not on PATH."""
    usual = [path for pattern in USUAL_FOLDERS for path in sorted(Path("/").glob(pattern))]
    newest_first = map(str, reversed(usual))
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *newest_first)))


def scratch(setting: Setting, name: str, suffix: str) -> Path:
    """Returns the path of a temporary file for a check."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return setting.work / f"{plain}{suffix}"
