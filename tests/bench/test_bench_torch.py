"""``bench/bench_torch.py`` runs, and has a figure for each floor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.thread_group import run_processes

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "bench_torch.py"
LIMIT_S = 120.0


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_torch

    return bench_torch


def figures_of(bench, cases):
    found = [floor.check(cases, {}) for floor in bench.FLOORS]
    return {one["floor"]: one["figure"] for one in found}


def test_without_pytorch_no_floor_is_checked(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    report = bench.measured(quick=False)
    assert {one["holds"] for one in report["floors"]} == {None}
    assert all(one["without"] == ["torch: not installed"] for one in report["floors"])
    assert "torch: not installed" in capsys.readouterr().out


@pytest.mark.torch
def test_benchmarks_without_a_launcher_have_measured_values(bench, capsys):
    def work(group):
        with bench.gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            return bench.tiny_in_two(mesh, quick=True), bench.held(mesh, quick=True)

    made = bench.Bench(quick=True)
    made.keep(bench.TINY_ALONE, bench.tiny_in_one_process(quick=True))
    for name, found in zip((bench.TINY, bench.HELD), run_processes(2, work)[0], strict=True):
        made.keep(name, found)
    found = figures_of(bench, made.cases)
    missing = {name for name, figure in found.items() if figure is None}
    assert missing == {
        floor.name for floor in bench.FLOORS if floor.case in {bench.OVERLAP, bench.HOOK}
    }
    assert 0 < found[bench.BUCKETS] <= 1
    assert bench.PARALLEL in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_runs_with_two_processes(bench, tmp_path):
    report = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(report)]
    subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=True, env=environment)
    cases = {
        one["name"]: bench.Case(one["name"], figures=one["figures"])
        for one in json.loads(report.read_text(encoding="utf-8"))["cases"]
    }
    found = figures_of(bench, cases)
    missing = [name for name, figure in found.items() if figure is None]
    assert missing == ([] if bench.has_cores() else [bench.SHARE])
    assert found[bench.LATE] <= 1
