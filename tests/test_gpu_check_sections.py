"""What the sections of ``bench/gpu_check.sh`` do with what their checks answer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from test_gpu_check import LIMIT_S, ROOT

pytestmark = pytest.mark.repo


@pytest.fixture
def rooms(monkeypatch) -> SimpleNamespace:
    """The modules of ``bench/gpu_check``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_check.child
    import gpu_check.record
    import gpu_check.run_nccl
    import gpu_check.run_sanitize
    import gpu_check.run_tests
    import gpu_check.section
    import gpu_check.setting

    return SimpleNamespace(**{name: module for name, module in vars(gpu_check).items()
                              if isinstance(module, ModuleType)})  # fmt: skip


@pytest.fixture
def setting(rooms, tmp_path):
    """What a section is told on a machine with one GPU."""
    return rooms.setting.Setting(False, rooms.setting.Gpu("NVIDIA H200"), tmp_path, tmp_path)


def driven(rooms, section, setting, answer: Callable) -> list:
    """All that a section asks for, when ``answer(check)`` is what comes of each."""
    checks, asked = section(setting), []
    with contextlib.suppress(StopIteration):
        asked.append(next(checks))
        while True:
            last = asked[-1]
            is_command = isinstance(last, rooms.section.Check)
            result = answer(last) if is_command else rooms.record.Result(last.name, last.outcome)
            asked.append(checks.send(result))
    return asked


def recorded(rooms, section, setting, tmp_path, seconds: float = LIMIT_S):
    record = rooms.record.Record(tmp_path / "it.json", {"section": "it"})
    rooms.section.run_section(section, record, setting, seconds, rooms.child.Stop())
    return json.loads(record.path.read_text(encoding="utf-8"))


def test_a_check_that_hangs_is_stopped_and_the_next_one_runs(rooms, setting, tmp_path):
    def section(_):
        code = (sys.executable, "-c", "import signal; signal.pause()")
        yield rooms.section.Check("a way that hangs", code, 0.2)
        yield rooms.section.Check("another way", (sys.executable, "-c", "print('there')"))

    found = recorded(rooms, section, setting, tmp_path)
    assert (found["status"], found["reason"]) == (
        "stopped", "a way that hangs: its deadline of 0.2 s",
    )  # fmt: skip
    assert [one["outcome"] for one in found["results"]] == ["stopped", "passed"]


def test_a_section_that_raises_has_failed(rooms, setting, tmp_path):
    def section(_):
        yield rooms.section.skipped("first", "not here")
        raise KeyError("second")

    found = recorded(rooms, section, setting, tmp_path)
    assert found["status"] == "failed"
    assert "KeyError('second')" in found["reason"]
    assert "Traceback" in found["results"][-1]["tail"]


def test_the_tests_need_what_the_machine_has(rooms, setting):
    names = ["tests/a.py", "tests/b/c.py"]

    def answer(check):
        return rooms.record.Result(check.name, "passed", figures=dict.fromkeys(names, 3))

    one = driven(rooms, rooms.run_tests.tests, setting, answer)
    assert [check.name for check in one] == ["collection", *names]
    for check in one:
        assert "--require-gpu" in check.command
        assert "gpu and not multi_gpu" in check.command
    two = rooms.setting.Setting(False, rooms.setting.Gpu("x", 2), setting.work, setting.work)
    (check, *_) = driven(rooms, rooms.run_tests.tests, two, answer)
    assert "gpu or multi_gpu" in check.command


def test_collected_files_are_counted(rooms):
    text = "tests/a.py: 3\ntests/b/c.py: 12\n\n15/99 tests collected (84 deselected) in 0.5s\n"
    assert rooms.run_tests.counts_of(text) == {"tests/a.py": 3, "tests/b/c.py": 12}


@pytest.mark.parametrize(("version", "shares"), [(22809, False), (23000, True), (None, False)])
def test_two_ranks_share_a_gpu_in_one_process_from_nccl_2_30_on(rooms, setting, version, shares):
    def answer(check):
        figures = {"version": version} if version else {}
        return rooms.record.Result(check.name, "passed" if version else "failed", figures=figures)

    asked = driven(rooms, rooms.run_nccl.nccl, setting, answer)
    named = {item.name: item for item in asked}
    shared = named["one process, 2 ranks on one GPU"]
    if shares:
        assert shared.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert shared.environment["NCCL_NVLS_ENABLE"] == "0"
    else:
        assert shared.outcome == "skipped"
    assert "a process for each of 2 ranks" in named
    commands = [item for item in asked if isinstance(item, rooms.section.Check)]
    assert sum(item.seconds for item in commands) <= 480


@pytest.fixture
def sanitizer(tmp_path, monkeypatch) -> Path:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tool


def test_the_sanitizer_is_left_out_where_it_is_not(rooms, setting, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rooms.run_sanitize, "USUAL_FOLDER", str(tmp_path / "nowhere"))
    (only,) = driven(rooms, rooms.run_sanitize.sanitize, setting, pytest.fail)
    assert only.outcome == "skipped"
    assert "neither on PATH nor in" in only.reason


@pytest.mark.parametrize(
    ("outcome", "tail", "names"),
    [
        ("passed", "", ["probe", "memcheck", "initcheck", "racecheck"]),
        ("failed", "========= Error: Device not supported", ["probe", "compute-sanitizer"]),
        ("failed", "no cupy", ["probe"]),
    ],
)
def test_the_sanitizer_is_tried_first(rooms, setting, sanitizer, outcome, tail, names):
    def answer(check):
        assert check.command[0] == str(sanitizer)
        return rooms.record.Result(check.name, outcome, tail=tail)

    asked = driven(rooms, rooms.run_sanitize.sanitize, setting, answer)
    assert [item.name for item in asked] == names
