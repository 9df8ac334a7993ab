"""Processes that take minutes run beside the other tests, from the moment that they are collected.

A test marked ``early(*arguments)`` is about a Python that runs with these arguments, and gets from
the fixture of that name what it printed and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import gradreduce

LIMIT_S = 900.0
ROOT = Path(__file__).resolve().parent.parent
_begun = pytest.StashKey[dict[tuple[str, ...], "Running"]]()


class Running:
    """A process, and the file that it prints to."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # see stop
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT, env=environment(), text=True, stdin=subprocess.DEVNULL,
            stdout=self._file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Waits for it."""
        status = self._process.wait(LIMIT_S)
        self._file.seek(0)
        return subprocess.CompletedProcess(self._process.args, status, self._file.read(), "")

    def stop(self) -> None:
        """Ends it, if nobody has waited for it."""
        with contextlib.closing(self._file):
            self._process.kill()
            self._process.wait()


def pytest_configure(config: pytest.Config) -> None:
    """None has begun."""
    config.stash[_begun] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    """All that will run is known."""
    if session.config.option.collectonly:
        return
    for item in session.items:
        for mark in item.iter_markers("early"):
            session.config.stash[_begun][mark.args] = Running(mark.args)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left behind, whatever ended the run."""
    for running in config.stash.get(_begun, {}).values():
        running.stop()


def environment(**changed: str) -> dict[str, str]:
    """In which a Python finds these tests' own modules, and the package under test."""
    folders = [ROOT / "tests", Path(gradreduce.__file__).parent.parent]
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHONPATH": path, "GRADREDUCE_BACKEND": "sim", **changed}


@pytest.fixture
def early(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """How the process of this test has ended."""
    mark = request.node.get_closest_marker("early")
    return request.config.stash[_begun][mark.args].ended()
