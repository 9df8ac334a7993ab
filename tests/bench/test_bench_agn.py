"""``bench/bench_agn.py`` runs, on the simulation and on the stand-in for CuPy.

What it measures is nothing to a test; that each floor finds its figure is, and what is compared.
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
SCRIPT = ROOT / "bench" / "bench_agn.py"
LIMIT_S = 120.0


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_agn
    from measure import agn_peers

    return SimpleNamespace(bench=bench_agn, peers=agn_peers)


@pytest.mark.host
def test_every_cpu_floor_has_a_measured_value(tools, monkeypatch, capsys):
    bench = tools.bench
    theirs = dict.fromkeys(tools.peers.WAYS.values(), int)
    monkeypatch.setattr(bench, "find_agn_peers", lambda *given, **more: (dict(theirs), {}))
    made = bench.Bench(bench.one_device(), quick=True)
    for case in bench.all_cases(made):
        case()
    found = {floor.name: floor.check(made.cases, {})["figure"] for floor in bench.CPU_FLOORS}
    assert [name for name, figure in found.items() if figure is None] == []
    launches = [figure for name, figure in found.items() if "launches" in name]
    assert launches == [1, 1, 1, 1]
    assert 0.25 <= found["bytes of the busiest device of the center"] <= 0.3
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
    assert {floor.case for floor in tools.bench.GPU_FLOORS} <= cases.keys()
    assert {"copy", "gradreduce cuda"} <= cases["adam"]["took"].keys()
    figures = cases["161 tiny variables"]["figures"]
    assert [figures[f"cuda, launches of a {what}"] for what in ("step", "communication")] == [1, 1]


def test_numpy_in_blocks_does_the_same_five_units(tools):
    rate, sizes = np.float32(0.1), (3, 100_000)
    step, arrays = tools.peers.local_sgd_in_blocks(sizes), []
    for value, total, gradient in step.args[0]:
        arrays.append((value, total, gradient, value - rate * gradient, total + gradient))
    step()
    assert sum(value.size for value, *_ in arrays) == sum(sizes)
    for value, total, gradient, wanted, summed in arrays:
        assert gradient.all()
        assert (value == wanted).all()
        assert (total == summed).all()


def test_torch_adds_as_often_as_it_steps(tools, monkeypatch):
    """The peer runs an optimizer's step and then one addition."""
    done = []
    tools.peers._both(lambda: done.append("step"), lambda: done.append("add"))
    assert done == ["step", "add"]
    monkeypatch.setattr(
        tools.peers, "find_optim_peers", lambda *given, **more: ({}, {"torch": "no"})
    )
    assert tools.peers.find_agn_peers("sgd", [3], place="cpu") == ({}, {"torch": "no"})


def test_a_step_that_does_not_change_all_elements_is_refused(tools):
    class Frozen(tools.bench.gr.Optimizer):
        def _apply(self, variable, slots, gradient):
            variable[:-1] -= gradient[:-1]

    with tools.bench.gr.open_mesh(1, backend="sim") as mesh:
        worker = tools.bench.Worker(lambda: Frozen("frozen"), mesh.devices[0], [8], 100)
        with pytest.raises(AssertionError, match="not every element"):
            tools.bench.checked("frozen", [worker])
