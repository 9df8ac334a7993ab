"""Runs slow processes in the background, one after the other, while the other tests run.

A test marked ``early(*arguments, **environment)`` checks a Python process that was run with these
arguments and environment variables, in an empty folder of its own. The fixture ``early`` returns
the result of the process. Tests with this mark run last.
"""

import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import gradreduce

LIMIT_S = 900.0
ROOT = Path(__file__).resolve().parents[2]


class FinishedRun(NamedTuple):
    """The result of a process, and the folder in which it ran."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path

    def check_passed(self, *, may_skip: bool = False) -> None:
        """Checks that this was a run of pytest in which tests passed."""
        assert self.returncode == 0, self.stdout[-6000:] + self.stderr
        counted = self.stdout.strip().splitlines()[-1]
        assert " passed" in counted, counted
        assert may_skip or "skipped" not in counted, counted


class BackgroundRunner:
    """A thread that runs processes one after the other.

    Attributes:
        marks: the marks of the tests; equal marks share a process.
    """

    def __init__(self, marks: Sequence[pytest.Mark]) -> None:
        self.marks = {_key(mark): mark for mark in marks}
        self._done = {key: threading.Event() for key in self.marks}
        self._ended: dict[Hashable, FinishedRun] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._folder = tempfile.TemporaryDirectory()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ended(self, mark: pytest.Mark) -> FinishedRun:
        """Waits for the process of a mark and returns its result.

        It may take longer than ``faulthandler_timeout`` of pyproject.toml.
        """
        faulthandler.cancel_dump_traceback_later()
        assert self._done[_key(mark)].wait(LIMIT_S), f"not in time: {mark}"
        return self._ended[_key(mark)]

    def stop(self) -> None:
        """Ends the running process, and starts no more."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()
        self._folder.cleanup()

    def _run(self) -> None:
        for number, (key, mark) in enumerate(self.marks.items()):
            folder = Path(self._folder.name, str(number))
            folder.mkdir()
            with self._lock:
                if self._is_over:
                    return
                self._process = subprocess.Popen(
                    [sys.executable, *mark.args],
                    cwd=folder, env=environment(**mark.kwargs), stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
                )  # fmt: skip
            stdout, stderr = self._process.communicate()
            self._ended[key] = FinishedRun(self._process.returncode, stdout, stderr, folder)
            self._done[key].set()


def _key(mark: pytest.Mark) -> Hashable:
    return mark.args, frozenset(mark.kwargs.items())


_make_like = pytest.StashKey[BackgroundRunner]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of these processes to the end."""
    items.sort(key=lambda item: item.get_closest_marker("early") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the first process, once all tests of the run are known."""
    marks = [mark for item in session.items for mark in item.iter_markers("early")]
    if marks and not session.config.option.collectonly:
        session.config.stash[_make_like] = BackgroundRunner(marks)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a process that still runs, also after an interrupted test run."""
    if _make_like in config.stash:
        config.stash[_make_like].stop()


def environment(**changed: str) -> dict[str, str]:
    """Environment variables so that a Python process finds the package and the tests' modules."""
    folders = [ROOT / "tests", Path(gradreduce.__file__).parent.parent]
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHONPATH": path, "GRADREDUCE_BACKEND": "sim", **changed}


@pytest.fixture
def early(request: pytest.FixtureRequest) -> FinishedRun:
    """The result of this test's process."""
    return request.config.stash[_make_like].ended(request.node.get_closest_marker("early"))
