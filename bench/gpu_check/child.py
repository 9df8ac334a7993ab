"""Runs one command in its own process group, until a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LOOK_SECONDS = 0.1  # between two checks of the deadline and the signals
GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL


class Stop:
    """Records signals that ask this program to end.

    It sets a flag and raises no exception: an exception right after the start of a child, before
    the child is stored, would leave the child running.

    Attributes:
        number: number of the received signal, or 0.
    """

    def __init__(self) -> None:
        self.number = 0

    @property
    def reason(self) -> str:
        """The signal's name; empty if none came."""
        return signal.Signals(self.number).name if self.number else ""

    def listen(self) -> None:
        """Installs handlers of SIGTERM, SIGINT and SIGHUP that only set the flag."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    Attributes:
        status: its exit status; negative if a signal ended it.
        seconds: its duration.
        finished: whether it ended by itself.
        output: its standard output and standard error, together.
    """

    status: int
    seconds: float
    finished: bool
    output: str


def run(
    command: Sequence[str],
    *,
    log: Path,
    cwd: Path,
    environment: Mapping[str, str],
    deadline: float,
    stop: Stop,
) -> CommandResult:
    """Runs a command and waits for it.

    Args:
        command: the program and its arguments.
        log: a file for the output. With a pipe this would wait for grandchildren that keep it open.
        cwd: its current folder.
        environment: its whole environment.
        deadline: the time, by ``time.monotonic``, at which it and its children are killed.
        stop: ends it early.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=cwd, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        finished = _wait(process, deadline, stop)
    finally:
        _end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    return CommandResult(process.returncode, time.monotonic() - start, finished, text)


def _wait(process: subprocess.Popen[bytes], deadline: float, stop: Stop) -> bool:
    """Waits; returns whether the command ended by itself, in time."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return True
        if stop.number or time.monotonic() >= deadline:
            return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the whole process group, with children of the command."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
