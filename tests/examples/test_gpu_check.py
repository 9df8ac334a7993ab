"""The notebook ``examples/gpu_check.ipynb``, whose cells run here on the fake CuPy."""

import json
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "gpu_check.ipynb").read_text(encoding="utf-8"))
CELLS = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]
         if cell["cell_type"] == "code"}  # fmt: skip
QUICK = [(["first:1"], 240), (["bench:bench_ops.py"], 240)]
SMI = "| NVIDIA-SMI 580.95   Driver Version: 580.95   CUDA Version: {}  |"


@pytest.fixture
def notebook(tmp_path, monkeypatch) -> SimpleNamespace:
    """Runs cells in one namespace, in a folder beside a clone."""
    (tmp_path / "gradreduce").symlink_to(ROOT)
    monkeypatch.chdir(tmp_path)
    names: dict = {}

    def run(*cells: str, **changed) -> None:
        for cell in cells:
            exec(compile(CELLS[cell], cell, "exec"), names)
        names.update(changed)

    return SimpleNamespace(names=names, run=run, folder=tmp_path)


@pytest.mark.host
@pytest.mark.slow
def test_its_cells_run_on_the_fake_and_leave_one_file(notebook, capsys):
    notebook.run("settings", FAKE=True, PLAN=QUICK)
    notebook.run(*list(CELLS)[1:])
    (written,) = notebook.folder.glob("*.json")
    assert written.name == "gpu_check.json"
    records = json.loads(written.read_text(encoding="utf-8"))["records"]
    text = capsys.readouterr().out
    assert {record["section"]: record["status"] for record in records} == {
        "first:1-versions": "passed", "bench:bench_ops.py": "passed",
    }, text  # fmt: skip
    chart = dict(re.findall(r"^(\S.*\S) +(\d+\.\d\d #*)$", text, re.MULTILINE))
    assert chart["plain copy"] == f"1.00 {'#' * 40}"
    share, bar = chart["add_n 8 float32"].split(" ")
    assert abs(len(bar) - 40 * float(share)) <= 1


def test_it_runs_every_step_of_first_and_two_more_sections(notebook, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_check.__main__ import parse

    notebook.run("settings")
    words = [word for sections, _ in notebook.names["PLAN"] for word in sections]
    wanted = parse(["first", "nccl", "example"]).asked
    assert sorted(parse(words).asked) == sorted(wanted)


def test_the_time_is_at_most_what_the_settings_say(notebook, capsys):
    """A program that hangs is ended, and no other one begins after the end."""
    notebook.run("settings", FAKE=True, MINUTES=0)
    notebook.run("run", "get", "install", "check")
    sections = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert sections == ["first:2", "first:7", "example", "first:9"]
    hangs = (sys.executable, "-c", "import signal; signal.pause()")
    assert notebook.names["run"](*hangs, seconds=0.5) == -signal.SIGTERM


@pytest.mark.parametrize(("version", "extra"), [("12.4", "cuda12"), ("13.0", "cuda13")])
def test_the_driver_decides_which_cuda_is_installed(notebook, monkeypatch, version, extra):
    """In an environment of its own, by its own pip."""
    monkeypatch.setenv("PATH", str(notebook.folder))
    notebook.run("settings", "run", "get")
    with pytest.raises(RuntimeError, match="a runtime, with a GPU"):
        notebook.run("install")
    (notebook.folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{SMI.format(version)}'\n")
    (notebook.folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{notebook.folder}:/usr/bin:/bin")
    commands: list[list[str]] = []

    def run(*command, **limits):
        commands.append([str(word) for word in command])
        assert limits["seconds"] <= 300
        return 0

    notebook.names["run"] = run
    notebook.run("install")
    venv, pip = commands
    assert "venv" in venv
    python = str(notebook.names["PYTHON"])
    assert python.startswith(venv[-1])
    assert pip[pip.index("--python") + 1] == python
    assert pip[-1] == f"{ROOT}[{extra},examples,cli,test]"


def test_it_is_cloned_where_there_is_no_clone(notebook):
    (notebook.folder / "gradreduce").unlink()
    notebook.run("settings", "run")
    with pytest.raises(FileNotFoundError, match="set REPOSITORY"):
        notebook.run("get")
    commands = []

    def run(*command, **limits):
        commands.append(command)
        (notebook.folder / "gradreduce").symlink_to(ROOT)

    notebook.names.update(REPOSITORY="https://example.org/gradreduce", run=run)
    notebook.run("get")
    assert commands == [
        ("git", "clone", "--depth", 1, "https://example.org/gradreduce", "gradreduce")
    ]
    assert notebook.names["ROOT"] == ROOT
