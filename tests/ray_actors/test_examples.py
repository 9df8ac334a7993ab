"""The examples that use Ray: they train, close what they have made, and end on Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gradreduce as gr

pytestmark = [pytest.mark.ray, pytest.mark.repo]
ROOT = Path(__file__).resolve().parents[2]
ALLOWED_S = 120.0  # the promise for a whole command on two cores
AGN = ("train_digits.py", "--mode", "agn", "--engine", "ray", "--micro-batches", "1")


@contextmanager
def started(folder: Path, script: str, *flags: str, **variables: str) -> Iterator[subprocess.Popen]:
    """An example in a process of its own; ends it if the test does not."""
    assert gr.__file__ is not None
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(gr.__file__).parents[1]),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PYTHONIOENCODING": "utf-8",
        **variables,
    }
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / script), "--backend", "sim", *flags],
        cwd=folder, env=environment, text=True, encoding="utf-8", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


@pytest.fixture
def joined(cluster) -> dict[str, str]:
    """The variables of a process that joins the cluster of the tests."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


def named_actors() -> set[str]:
    import ray

    return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}


def waits_for(condition: Callable[[], object]) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + ALLOWED_S
    while time.monotonic() < end:
        if condition():
            return True
    return False


def cells(text: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def is_picture(path: Path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_workers_of_agn_in_processes(joined, tmp_path):
    before = named_actors()
    flags = ("--workers", "2", "--period", "5", "--steps", "20")
    with started(tmp_path, *AGN, *flags, **joined) as program:
        text = program.communicate(timeout=ALLOWED_S)[0]
    assert program.returncode == 1, text  # below the goal
    assert [row[:2] for row in cells(text)[:2]] == [["worker 0", "20"], ["worker 1", "20"]]
    rows = {row[0]: row[1] for row in cells(text)[2:]}
    assert rows["workers"] == "2, each of 1 replicas"
    assert rows["devices"] == "1 on simulated 0, in each of 2 processes"
    assert rows["pushes"] == "8"
    assert "8 pushes, " in text
    assert float(rows["launches per step"]) > 1
    assert "The test accuracy 0." in text
    assert is_picture(tmp_path / "digits.png")
    assert waits_for(
        lambda: named_actors() == before
    )  # the cluster is still there, without the center


def test_ctrl_c_closes_the_center(joined, tmp_path):
    before = named_actors()
    with started(tmp_path, *AGN, "--workers", "1", "--steps", "10000", **joined) as program:
        assert waits_for(lambda: named_actors() - before)
        (name,) = named_actors() - before
        assert re.fullmatch(r"digits-[0-9a-f]{8}", name)
        assert waits_for(gr.ray.AGNCenter(name).workers)  # the first push
        program.send_signal(signal.SIGINT)
        text = program.communicate(timeout=ALLOWED_S)[0]
    assert program.returncode != 0
    assert "KeyboardInterrupt" in text
    assert waits_for(lambda: named_actors() == before)


@pytest.mark.slow
def test_four_workers_of_agn_reach_the_goal(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with started(tmp_path, *AGN[:-2], HOME=str(tmp_path)) as program:
        text = program.communicate(timeout=ALLOWED_S)[0]
    assert program.returncode == 0, text
    rows = {row[0]: row[1] for row in cells(text)}
    assert rows["pushes"] == "200"
    assert float(rows["test accuracy"]) >= 0.95
    assert is_picture(tmp_path / "digits.png")
