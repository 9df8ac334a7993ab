"""The JSON file of a section, rewritten after every change.

It is written as a whole before the section begins and after every step. If the run is killed, the
file contains the results up to then, with the status ``stopped``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, STOPPED, SKIPPED = "passed", "failed", "stopped", "skipped"


@dataclass(frozen=True)
class Result:
    """The result of a check."""

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
    """The results of a section so far; ``header`` has the entries that do not change."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.results: list[Result] = []
        self.section = str(header["section"])
        self._header = dict(header)
        self._start: float | None = None
        self.save(STOPPED, "it has not begun")

    def begin(self, name: str) -> None:
        """Records that a check has started, in case the run is killed."""
        running = Result(name, STOPPED, reason="the run ended during it")
        self.save(STOPPED, f"the run ended during {name!r}", running)

    def add(self, result: Result) -> None:
        """Records the result of a check."""
        self.results.append(result)
        self.save(STOPPED, f"the run ended after {result.name!r}")

    def finish(self) -> None:
        """Records that all checks have ended."""
        outcomes = [result.outcome for result in self.results]
        status = next((one for one in (FAILED, STOPPED, PASSED) if one in outcomes), SKIPPED)
        of_status = [each for each in self.results if each.outcome == status and each.reason]
        self.save(status, f"{of_status[0].name}: {of_status[0].reason}" if of_status else "")

    def save(self, status: str, reason: str, *running: Result) -> None:
        """Writes the file, with a check that is running."""
        self.status, self.reason = status, reason
        if running and self._start is None:
            self._start = time.monotonic()
        seconds = 0.0 if self._start is None else time.monotonic() - self._start
        content = {
            **self._header,
            "status": status,
            "reason": reason,
            "seconds": round(seconds, 3),
            "results": [asdict(result) for result in (*self.results, *running)],
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)  # in one step: nobody reads half a file
