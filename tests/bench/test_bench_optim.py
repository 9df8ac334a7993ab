"""``bench/bench_optim.py`` runs, on the simulation and on the stand-in for CuPy.

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
SCRIPT = ROOT / "bench" / "bench_optim.py"
LIMIT_S = 120.0


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_optim
    from measure import optim_peers, random_values

    return SimpleNamespace(bench=bench_optim, peers=optim_peers, values=random_values)


@pytest.mark.host
def test_every_cpu_floor_has_a_measured_value(tools, monkeypatch, capsys):
    bench = tools.bench
    theirs = {f"torch {way}": int for way in tools.peers.WAYS}
    monkeypatch.setattr(bench, "find_optim_peers", lambda *given, **more: (dict(theirs), {}))
    made = bench.Bench(bench.one_device(), quick=True)
    for case in bench.all_cases(made):
        case()
    found = {floor.name: floor.check(made.cases, {})["figure"] for floor in bench.CPU_FLOORS}
    assert [name for name, figure in found.items() if figure is None] == []
    assert found["compiled, launches of a step"] == found["numpy, launches of a step"] == 1
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
    assert cases["161 tiny variables"]["figures"]["cuda, launches"] == 1


def test_an_update_lost_in_rounding_is_no_fault_and_an_element_left_out_is_one(tools):
    """RMSProp's first step of a small gradient is less than half a unit of its value."""
    bench = tools.bench
    with bench.gr.open_mesh(1, backend="sim") as mesh:
        step = bench.Step(bench.RULES["rmsprop"][0], mesh.devices[0], [tools.values.PATTERN_SIZE])
        bench.checked("rmsprop", [step])
        start = tools.values.normals(tools.values.PATTERN_SIZE, seed=tools.values.VALUES)
        moved = step.variables[0].numpy()
    moved[-1] = start[-1]
    with pytest.raises(AssertionError, match="not every element"):
        bench.checked("rmsprop", [Left(moved)])


class Left:
    """A step that leaves one variable with these values."""

    def __init__(self, values: np.ndarray) -> None:
        self.variables = [SimpleNamespace(numpy=lambda: values)]

    def __call__(self) -> None:
        """Does nothing."""


def test_numpy_in_blocks_does_the_same(tools):
    values = [np.arange(size, dtype=np.float32) for size in (3, 100_000)]
    gradients = [np.full(value.size, 0.5, np.float32) for value in values]
    wanted = [value - np.float32(0.1) * np.float32(0.5) for value in values]
    tools.peers.sgd_in_blocks(values, gradients)()
    assert all(map(np.array_equal, values, wanted))


def test_the_variables_are_as_large_as_is_said(tools):
    sizes = tools.peers.sizes_of(16_000_000, 50)
    assert (sum(sizes), len(sizes), min(sizes) > 0) == (16_000_000, 50, True)
    assert len(set(sizes)) > 40


def test_a_step_that_does_not_change_all_elements_is_refused(tools):
    class Frozen(tools.bench.gr.Optimizer):
        def _apply(self, variable, slots, gradient):
            variable[:-1] -= gradient[:-1]

    with tools.bench.gr.open_mesh(1, backend="sim") as mesh:
        step = tools.bench.Step(lambda: Frozen("frozen"), mesh.devices[0], [8])
        with pytest.raises(AssertionError, match="not every element"):
            tools.bench.checked("frozen", [step])
