"""How a section is run: its checks one by one, each recorded; never knows what they are.

A section is a generator. It yields checks, and is sent the result of each, so that what is asked
next may depend on it.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import Ended, Stop, run
from .record import FAILED, PASSED, SKIPPED, STOPPED, Record, Result
from .setting import ROOT, Setting, environment

__all__ = ["Check", "Checks", "Limit", "Section", "Verdict", "run_section", "scratch", "skipped"]

TAIL_CHARACTERS = 4000


def _no_figures(output: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Check:
    """One command.

    Attributes:
        name: for the record.
        command: the program and its arguments.
        seconds: after which it is stopped; the section's own limit holds besides.
        environment: what it needs beside the environment of all children.
        read: its figures, from its output and from files that it left. What this raises makes the
            check fail.
        passes: the exit statuses that are no failure.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = math.inf
    environment: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Mapping[str, Any]] = _no_figures
    passes: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Verdict:
    """What a section has found out by itself, from results that it has."""

    name: str
    outcome: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def skipped(name: str, reason: str) -> Verdict:
    """A check that cannot be made here."""
    return Verdict(name, SKIPPED, reason=reason)


Checks = Generator[Check | Verdict, Result, None]
Section = Callable[[Setting], Checks]


@dataclass(frozen=True)
class Limit:
    """Until when a section may run.

    Attributes:
        seconds: that it has.
        deadline: by ``time.monotonic``.
    """

    seconds: float
    deadline: float

    @property
    def reason(self) -> str:
        """Why the section was ended early; empty while there is time."""
        over = time.monotonic() >= self.deadline
        return f"its limit of {self.seconds:g} s" if over else ""


def run_section(
    section: Section, record: Record, setting: Setting, seconds: float, stop: Stop
) -> None:
    """Runs all checks of a section, or those for which there is time."""
    limit = Limit(seconds, time.monotonic() + seconds)
    checks = section(setting)
    try:
        asked = next(checks)
        while True:
            result = _perform(asked, record, setting, limit, stop)
            record.add(result)
            _say(result)
            ended = stop.reason or limit.reason
            if ended and result.outcome == STOPPED:
                record.finish(ended)
                return
            asked = checks.send(result)
    except StopIteration:
        record.finish()
    except Exception as error:  # the section's own fault; the next one must not suffer
        record.add(Result("the section itself", FAILED, reason=repr(error),
                          tail=traceback.format_exc()[-TAIL_CHARACTERS:]))  # fmt: skip
        _say(record.results[-1])
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


def _judged(asked: Check, ended: Ended) -> Result:
    passed = ended.status in asked.passes
    reason = "" if passed else f"exit status {ended.status}"
    figures: Mapping[str, Any] = {}
    try:
        figures = asked.read(ended.output)
    except Exception as error:  # whatever a file that is missing or cut short leads to
        if passed:
            passed, reason = False, f"its figures cannot be read: {error!r}"
    return _result(asked, ended, PASSED if passed else FAILED, figures, reason)


def _result(
    asked: Check, ended: Ended, outcome: str, figures: Mapping[str, Any], reason: str
) -> Result:
    tail = "" if outcome == PASSED else ended.output[-TAIL_CHARACTERS:]
    return Result(asked.name, outcome, round(ended.seconds, 3), figures, reason, tail)


def _say(result: Result) -> None:
    """One line for whoever watches, and the end of the output of what went wrong."""
    words = f"{result.name:<50} {result.outcome:<8} {result.seconds:7.1f} s  {result.reason}"
    print(words.rstrip(), flush=True)
    if result.tail:
        print(result.tail, file=sys.stderr, flush=True)


def scratch(setting: Setting, name: str, suffix: str) -> Path:
    """Where a check of this name may leave a file."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return setting.work / f"{plain}{suffix}"
