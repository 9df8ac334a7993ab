"""Runs the checks of a section one by one, and records each.

A section is a generator: it yields checks and is sent the result of each, on which the next check
may depend. Every check has its own deadline, so that the others have time if one hangs.
"""

import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from measure.in_processes import words_of

from .child import Stop, run
from .setting import ROOT, Setting, environment

PASSED, FAILED, STOPPED, SKIPPED = "passed", "failed", "stopped", "skipped"
TAIL_CHARACTERS = 4000
# What a library that is built for CPUs says when it is asked for a GPU.
NO_GPU = {"torch": "Torch not compiled with CUDA enabled", "jax": "Unknown backend: 'gpu'"}


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed, stopped or skipped
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""  # why it did not pass
    tail: str = ""  # the end of its output, if it failed or was stopped


def skipped(name: str, reason: str) -> Result:
    """Returns the result of a check that cannot run here."""
    return Result(name, SKIPPED, reason=reason)


class Record:
    """The results of a section so far, in a JSON file that is rewritten after every change.

    It is written as a whole before the section begins and after every step. If the run is killed,
    the file contains the results up to then, with the status ``stopped``. ``header`` has the
    entries that do not change.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.results: list[Result] = []
        self.section = str(header["section"])
        self._header = dict(header)
        self._start: float | None = None
        self.save(STOPPED, "it has not begun")

    def begin(self, name: str) -> None:
        """Records that a check has started, in case the run is killed."""
        self._start = self._start or time.monotonic()
        running = Result(name, STOPPED, reason="the run ended during it")
        self.save(STOPPED, f"the run ended during {name!r}", running)

    def add(self, result: Result) -> None:
        """Records a result and prints it, with the end of the output of a failure."""
        self.results.append(result)
        self.save(STOPPED, f"the run ended after {result.name!r}")
        words = f"{result.name:<50} {result.outcome:<8} {result.seconds:7.1f} s  {result.reason}"
        print(words.rstrip(), flush=True)
        if result.tail:
            print(result.tail, file=sys.stderr, flush=True)

    def finish(self) -> None:
        outcomes = [result.outcome for result in self.results]
        status = next((one for one in (FAILED, STOPPED, PASSED) if one in outcomes), SKIPPED)
        of_status = [each for each in self.results if each.outcome == status and each.reason]
        self.save(status, f"{of_status[0].name}: {of_status[0].reason}" if of_status else "")

    def save(self, status: str, reason: str, *running: Result) -> None:
        """Writes the file, with a check that is running."""
        self.status, self.reason = status, reason
        content = {
            **self._header,
            "status": status,
            "reason": reason,
            "seconds": round(time.monotonic() - self._start, 3) if self._start else 0.0,
            "results": [asdict(result) for result in (*self.results, *running)],
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)  # in one step: nobody reads half a file


@dataclass(frozen=True)
class Check:
    """A command to run, with its limits; checks with the same name are equal."""

    name: str
    command: tuple[str, ...]
    seconds: float  # its deadline; the limit of the section applies too
    environment: Mapping[str, str] = field(default_factory=dict)  # to add to that of all children
    # Returns its figures, from its output and its files. If this raises, the check fails.
    read: Callable[[str], Mapping[str, Any]] = lambda output: {}
    passes: frozenset[int] = frozenset({0})  # the exit statuses that are not a failure
    # Words in the output of a failed check -> why it cannot run here.
    skips: Mapping[str, str] = field(default_factory=dict)


Checks = Generator[Check | Result, Result, None]  # a result of what needs no command
Section = Callable[[Setting], Checks]
Done = MutableMapping[str, tuple[str, Result]]  # check -> the section that ran it, and its result


def run_section(
    of: Section, record: Record, setting: Setting, stop: Stop, done: Done | None = None
) -> None:
    """Runs the checks of a section within its time limit.

    Checks in ``done`` have run before and are not repeated; those of this section are added.
    """
    done = {} if done is None else done
    end = time.monotonic() + setting.limit
    checks = of(setting)
    try:
        asked = next(checks)
        while True:
            if asked.name in done:
                where, result = done[asked.name]
                record.add(skipped(asked.name, f"{where} has run it"))
                asked = checks.send(result)
                continue
            result = asked if isinstance(asked, Result) else _run(asked, record, setting, stop, end)
            record.add(result)
            if result.outcome != SKIPPED:
                done[result.name] = record.section, result
            if result.outcome == STOPPED and (ended := _ended(setting, stop, end)):
                record.save(STOPPED, ended)
                return
            asked = checks.send(result)
    except StopIteration:
        record.finish()
    except Exception as error:  # the section's own fault; the next one must not suffer
        tail = traceback.format_exc()[-TAIL_CHARACTERS:]
        record.add(Result("the section itself", FAILED, reason=repr(error), tail=tail))
        record.finish()
    finally:
        checks.close()


def _ended(setting: Setting, stop: Stop, end: float) -> str:
    """Returns why the section ends early; empty while there is time."""
    return stop.reason or (f"its limit of {setting.limit:g} s" if time.monotonic() >= end else "")


def _run(asked: Check, record: Record, setting: Setting, stop: Stop, end: float) -> Result:
    """Runs a check, and judges what it has done."""
    record.begin(asked.name)
    ended = run(
        asked.command,
        log=setting.work / f"{record.path.stem}-{len(record.results)}.log",
        cwd=ROOT,
        environment={**environment(fake=setting.fake, work=setting.work), **asked.environment},
        deadline=min(end, time.monotonic() + asked.seconds),
        stop=stop,
    )
    seconds, tail = round(ended.seconds, 3), ended.output[-TAIL_CHARACTERS:]
    if not ended.finished:
        why = _ended(setting, stop, end) or f"its deadline of {asked.seconds:g} s"
        return Result(asked.name, STOPPED, seconds, {}, why, tail)
    passed = ended.status in asked.passes
    reason = "" if passed else f"exit status {ended.status}"
    figures: Mapping[str, Any] = {}
    try:
        figures = asked.read(ended.output)
    except Exception as error:  # whatever a file that is missing or cut short leads to
        if passed:
            passed, reason = False, f"its figures cannot be read: {error!r}"
    reasons = [why for words, why in asked.skips.items() if words in ended.output]
    if reasons and not passed:
        return Result(asked.name, SKIPPED, seconds, {}, reasons[0])
    if passed:
        return Result(asked.name, PASSED, seconds, figures)
    return Result(asked.name, FAILED, seconds, figures, reason, tail)


def function(
    setting: Setting, /, name: str, of: str, seconds: float, *arguments: Any, **environment: str
) -> Check:
    """Calls a function of ``gpu_check``, which returns its figures, in a process of its own.

    ``of`` names it, such as ``programs:add``. It takes ``quick``, for tiny sizes, and the further
    arguments.
    """
    report = setting.scratch(name)
    words = words_of(report, f"gpu_check.{of}", setting.fake, *arguments)
    return Check(name, setting.python(*words), seconds, environment, report_of(report))


def needing(library: str, check: Check) -> Check | Result:
    """Returns a check that needs a library with GPU support, or why it is skipped."""
    if importlib.util.find_spec(library) is None:
        return skipped(check.name, f"not installed: {library}")
    return replace(check, skips={NO_GPU[library]: f"{library} is built without GPUs"})


def report_of(path: Path) -> Callable[[str], Mapping[str, Any]]:
    """Returns what reads the figures that a program wrote to a JSON file."""
    return lambda output: dict(json.loads(path.read_text(encoding="utf-8")))
