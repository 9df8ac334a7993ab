"""The examples that use Ray: they train, close what they have made, and end on Ctrl-C."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.examples import cells, is_picture
from support.libraries import ray

import gradreduce as gr

pytestmark = [pytest.mark.ray, pytest.mark.repo]
ROOT = Path(__file__).resolve().parents[2]
ALLOWED_S = 120.0  # the promise for a whole command on two cores
AGN = ("train_digits.py", "--mode", "agn", "--engine", "ray", "--backend", "sim")


@contextmanager
def started(folder: Path, script: str, *flags: str, **variables: str) -> Iterator[subprocess.Popen]:
    """An example in a process of its own; ends it if the test does not."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(gr.__file__).parents[1]), "COLUMNS": "100",
        "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8", **variables,
    }  # fmt: skip
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / script), *flags],
        cwd=folder, env=environment, text=True, encoding="utf-8", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


@pytest.fixture(scope="module")
def joined(cluster) -> dict[str, str]:
    """The variables of a process that joins the cluster of the tests."""
    address = ray.get_runtime_context().gcs_address
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


def actors_of(example: str) -> list[str]:
    """The names of the actors that it has made and not closed."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if re.fullmatch(rf"{example}-[0-9a-f]{{8}}", name)]


def wait_until_true(condition: Callable[[], object]) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + ALLOWED_S
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory) -> dict[str, tuple[int, str, Path]]:
    """Exit status, text and folder of a short training by AGN, and of one with backup workers.

    Both run in this process, whose workers import the large libraries once for both.
    """
    import rich

    runs = {
        "digits": (*AGN, "--micro-batches", "1", "--period", "5"),
        "sync-replicas": ("sync_replicas_ray.py", "--late-every", "1"),
    }
    found = {}
    for name, (script, *flags) in runs.items():
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as text:
            patch.chdir(folder)
            patch.setattr(rich, "_console", Console(width=100, color_system=None))
            main = importlib.import_module(Path(script).stem).main
            status = main([*flags, "--workers", "2", "--steps", "20"])
        found[name] = status, text.getvalue(), folder
    return found


def test_workers_of_agn_in_processes(ended):
    status, text, folder = ended["digits"]
    assert status == 1, text  # below the goal
    assert [row[:2] for row in cells(text)[:2]] == [["worker 0", "20"], ["worker 1", "20"]]
    rows = {row[0]: row[1] for row in cells(text)[2:]}
    assert rows["workers"] == "2, each of 1 replicas"
    assert rows["devices"] == "1 on simulated 0, in each of 2 processes"
    assert rows["pushes"] == "8"
    assert "8 pushes, " in text
    assert float(rows["launches per step"]) > 1
    assert "The test accuracy 0." in text
    assert is_picture(folder / "train_digits.png")
    assert wait_until_true(lambda: not actors_of("digits"))  # the cluster is still there


def test_backup_workers_in_processes(ended):
    status, text, folder = ended["sync-replicas"]
    assert status == 1, text
    counts = [list(map(int, row[2:])) for row in cells(text) if row[1].startswith("process ")]
    assert [row[0] for row in counts] == [20, 0]
    assert counts[1][1] == counts[1][2]  # all of the straggler's were delayed, and dropped
    rows = {row[0]: row[1] for row in cells(text)}
    assert rows["global step"] == "20"
    assert rows["dropped"] == f"{counts[1][1]}, {counts[1][2]} of them delayed"
    assert is_picture(folder / "sync_replicas_ray.png")
    assert wait_until_true(lambda: not actors_of("sync-replicas"))


@pytest.mark.slow
def test_ctrl_c_closes_the_center(joined, ended, tmp_path):
    flags = ("--micro-batches", "1", "--workers", "1", "--period", "1", "--steps", "10000")
    with started(tmp_path, *AGN, *flags, **joined) as program:
        assert wait_until_true(lambda: actors_of("digits"))
        center = gr.ray.AGNCenter(*actors_of("digits"))
        assert wait_until_true(center.workers)  # the first push
        program.send_signal(signal.SIGINT)
        text = program.communicate(timeout=ALLOWED_S)[0]
    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in text
    assert wait_until_true(lambda: not actors_of("digits"))


def test_a_worker_applies_one_gradient_per_step(capsys):
    script = importlib.import_module("sync_replicas_ray")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--workers", "2", "--replicas-to-aggregate", "3"])
    assert stopped.value.code == 2
    assert "--replicas-to-aggregate: got 3 for 2 workers; allowed: " in capsys.readouterr().err


def reached(folder: Path, monkeypatch: pytest.MonkeyPatch, *command: str) -> dict[str, str]:
    """Rows of the table of a command that reaches the goal in a cluster of its own."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with started(folder, *command, HOME=str(folder)) as program:
        text = program.communicate(timeout=ALLOWED_S)[0]
    assert program.returncode == 0, text
    rows = {row[0]: row[1] for row in cells(text)}
    assert float(rows["test accuracy"]) >= 0.95
    return rows


@pytest.mark.slow
def test_backup_workers_reach_the_goal(tmp_path, monkeypatch):
    assert int(reached(tmp_path, monkeypatch, "sync_replicas_ray.py")["accepted"]) >= 1600


def kill_task(index: int) -> None:
    """Kills one of the processes of this cluster that run ``work``, a worker of AGN."""
    token = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = token in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and (folder / "cmdline").read_bytes().startswith(b"ray::work"):
                found.append(int(folder.name))
    os.kill(sorted(found)[index], signal.SIGKILL)


@pytest.mark.slow
def test_a_rule_reaches_the_goal_although_two_workers_are_killed(cluster, tmp_path, monkeypatch):
    """Ray starts them again. Each acknowledged push counts once, in the center's own counts."""
    import agn_ray

    watch, counts = agn_ray.watch, dict[str, int]()

    def killing(center, tasks, period):
        for index in range(2):
            assert wait_until_true(
                lambda: min([each.step for each in center.workers()] or [0]) >= 5 * period
            )
            kill_task(index)
        watch(center, tasks, period)
        counts.update(center.state_dict()["progress"])

    monkeypatch.setattr(agn_ray, "watch", killing)
    monkeypatch.chdir(tmp_path)
    with redirect_stdout(StringIO()) as text:
        status = importlib.import_module("train_digits").main(
            [*AGN[1:], "--rule", "delayed-nesterov", "--micro-batches", "1", "--steps", "500"]
        )
    assert status == 0, text.getvalue()
    assert counts["num_pushes"] == counts["num_updates"]
    # All pushes of the workers that ended well, and from 5 to 50 of each that was killed.
    assert 4 * 50 + 2 * 5 <= counts["num_pushes"] <= 6 * 50


@pytest.mark.slow
def test_four_workers_of_agn_reach_the_goal(tmp_path, monkeypatch):
    assert reached(tmp_path, monkeypatch, *AGN)["pushes"] == "200"
    assert is_picture(tmp_path / "train_digits.png")
