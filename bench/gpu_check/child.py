"""Runs one command in its own process group, until a deadline."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

LOOK_SECONDS = 0.1  # between two checks of the deadline and the signals
GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL


class Stop:
    """Records signals that ask this program to end.

    It sets a flag and raises no exception: an exception right after the start of a child, before
    the child is stored, would leave the child running.
    """

    number = 0  # of the signal

    @property
    def reason(self) -> str:
        """The signal's name; empty if none came."""
        return signal.Signals(self.number).name if self.number else ""

    def listen(self) -> None:
        """Installs handlers that only set the flag."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.number = number


class CommandResult(NamedTuple):
    status: int  # negative if a signal ended it
    seconds: float
    finished: bool  # it ended by itself
    output: str  # standard output and standard error, together


def run(command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str],
        deadline: float, stop: Stop) -> CommandResult:  # fmt: skip
    """Runs a command and waits for it, until a time of ``time.monotonic`` or a signal.

    Its output goes to the file ``log``. With a pipe this would wait for grandchildren that keep it
    open.
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
    while not stop.number and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return True
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
