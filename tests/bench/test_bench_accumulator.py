"""``bench/bench_accumulator.py`` runs, on the simulation and on the stand-in for CuPy.

What it measures is nothing to a test; that each floor finds its figure is, and what is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "bench_accumulator.py"
LIMIT_S = 120.0


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_accumulator
    from measure import clock

    return SimpleNamespace(bench=bench_accumulator, clock=clock)


@pytest.mark.host
def test_every_cpu_floor_has_a_measured_value(tools, monkeypatch, capsys):
    bench = tools.bench
    theirs = {bench.CYCLE: int, bench.DROP: int}
    monkeypatch.setattr(bench, "find_accumulator_peer", lambda gradient: (theirs, {}))
    made = bench.Bench(bench.one_device(), quick=True)
    for case in bench.all_cases(made):
        case()
    found = {floor.name: floor.check(made.cases, {})["figure"] for floor in bench.CPU_FLOORS}
    assert [name for name, figure in found.items() if figure is None] == []
    assert found["numpy, launches of a joint apply"] == 1
    assert "gradreduce compiled" in capsys.readouterr().out


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_runs_with_the_cupy_stub(tmp_path, tools):
    report = tmp_path / "report.json"
    folders = [ROOT / "src", ROOT / "bench", ROOT / "tests"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fake_cupy", str(SCRIPT), "--quick", "--json", str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["implementations"], found["floors"]) == (["cuda"], [])
    cases = {one["name"]: one for one in found["cases"]}
    for floor in tools.bench.GPU_FLOORS:
        assert floor.case in cases
    assert set(cases["take, MEAN"]["took"]) == {"copy", "gradreduce cuda"}
    assert cases["161 accumulators"]["figures"]["cuda, launches"] == 1


def test_setup_before_a_call_is_not_timed(tools, monkeypatch):
    clock, now = tools.clock, [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: None)

    def lasts(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    calls = {"alone": lasts(2.0), "after": clock.After(lasts(100.0), lasts(3.0))}
    assert clock.host_seconds(calls, 4, quick=True) == {"alone": 2.0, "after": 3.0}
    taken = clock.HostClock(quick=True, of_rounds=min).measure(calls, 8)
    assert [taken[name].seconds for name in calls] == [2.0, 3.0]


def test_a_wrong_result_is_refused(tools):
    right = np.ones(3, np.float32)
    tools.bench.check("right", right, right)
    with pytest.raises(AssertionError, match="wrong is not what NumPy makes it"):
        tools.bench.check("wrong", right * 2, right)
