"""``bench/bench_all_reduce.py`` runs, on the simulation and on the stand-in for CuPy and NCCL.

What it measures is nothing to a test; that each floor finds its figure is, and the arithmetic.
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
SCRIPT = ROOT / "bench" / "bench_all_reduce.py"
LIMIT_S = 120.0


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_all_reduce
    from measure import clock, reduced

    return SimpleNamespace(bench=bench_all_reduce, clock=clock, reduced=reduced)


def figures_of(floors, cases, absent) -> dict[str, float | None]:
    return {floor.name: floor.check(cases, absent)["figure"] for floor in floors}


@pytest.mark.host
def test_every_cpu_floor_has_a_measured_value(tools, monkeypatch, capsys):
    monkeypatch.setattr(tools.bench, "find_all_reduce_peers", lambda _: (
        {"tf one device": int, "tf hierarchical_copy": int, "torch sum, copies": int}, {}
    ))  # fmt: skip
    bench = tools.bench.on_cpu(quick=True)
    figures = figures_of(tools.bench.CPU_FLOORS, bench.cases, bench.absent)
    assert [name for name, figure in figures.items() if figure is None] == []
    assert "gradreduce compiled, num_packs=1, NumPy arrays" in capsys.readouterr().out


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
    assert {"us over raw", "ours us", "raw us"} == set(cases["2 NCCL ranks on one GPU"]["figures"])
    assert "num_packs=1, prepared, host us" in cases["ResNet-50, 8 on one GPU"]["figures"]
    assert cases["one tensor, 1024 bytes, 8 on one GPU"]["num_replicas"] == 8
    assert {"raw NCCL", "gradreduce cuda"} <= set(
        cases["one tensor, 1024 bytes, each on a GPU"]["took"]
    )


def test_bandwidths_are_those_of_nccl_tests(tools, capsys):
    took = {
        "copy": tools.clock.Took(0.5, 0.5),
        "gradreduce numpy": tools.clock.Took(2.0, 0.25),
    }
    case = tools.reduced.Reduced("one", "4 GB", 0, took, {}, 4_000_000_000, 4)
    assert case.as_json()["rates"] == {"gradreduce numpy": {"algbw": 2e9, "busbw": 3e9}}
    case.show()
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "numpy" in each)
    assert line.split()[2:] == ["4000000000", "2000.0000", "2.00", "3.00", "0.25", "250000.0"]


def test_a_result_that_is_not_the_mean_is_refused(tools):
    tensors = tools.bench.hosts([(3,), (5, 2)])
    means = [[sum(replicas) / np.float32(4)] * 4 for replicas in tensors]
    tools.bench.check("right", means, tensors)
    means[1][3] = means[1][3] + np.float32(0.25)
    with pytest.raises(AssertionError, match="wrong: tensor 1 on device 3 is not the mean"):
        tools.bench.check("wrong", means, tensors)


def test_a_copy_by_one_thread_is_by_one(tools):
    copy = tools.clock.HostCopy(64, 1)
    assert len(copy._parts) == 1
    copy()
    target, source = copy._parts[0]
    assert target.nbytes == source.nbytes == 32
    assert (target == source).all()
    assert len(set(source)) == source.size
