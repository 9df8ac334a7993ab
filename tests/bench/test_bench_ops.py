"""``bench/bench_ops.py`` runs, on the simulation and on the stand-in for CuPy, and keeps floors.

What it measures is nothing to a test; that each floor finds its figure is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "bench_ops.py"
LIMIT_S = 240.0


def run(tmp_path, *before: str) -> tuple[dict, str]:
    """The figures and the output of a quick run."""
    report = tmp_path / "report.json"
    folders = [ROOT / "src", ROOT / "bench", ROOT / "tests"]
    done = subprocess.run(
        [sys.executable, "-P", *before, str(SCRIPT), "--quick", "--json", str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text(encoding="utf-8")), done.stdout


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_ops
    from measure import case, clock, floors

    return SimpleNamespace(bench_ops=bench_ops, case=case, clock=clock, floors=floors)


def check_figures(report: dict, floors) -> None:
    """Every floor has a figure, except those whose peer was left out."""
    assert report["floors"] == []  # a quick run checks none
    assert {one["name"] for one in report["cases"]} >= {floor.case for floor in floors}


@pytest.mark.host
@pytest.mark.slow
def test_it_runs_with_both_implementations(tmp_path, tools):
    report, text = run(tmp_path)
    assert report["implementations"] == ["numpy", "compiled"]
    check_figures(report, tools.bench_ops.CPU_FLOORS)
    cases = {one["name"]: tools.case.Case(**one) for one in report["cases"]}
    for floor in tools.bench_ops.CPU_FLOORS[3:]:  # the first three compare times
        assert floor.check(cases, {})["holds"] is not None, floor.name
    for library, why in report["absent"].items():
        assert f"{library}: {why}" in text
    (added,) = (one for one in report["cases"] if one["name"] == "add_n 8 float32")
    assert {"gradreduce numpy", "gradreduce compiled", "numpy chain", "copy"} <= set(added["took"])


@pytest.mark.host
@pytest.mark.slow
def test_it_runs_with_the_cupy_stub(tmp_path, tools):
    report, text = run(tmp_path, "-m", "fake_cupy")
    assert report["implementations"] == ["cuda"]
    assert "cupy: the stand-in of the tests has no arithmetic" in text
    check_figures(report, tools.bench_ops.GPU_FLOORS)
    figures = {one["name"]: one["figures"] for one in report["cases"]}
    for name in ("pack ResNet-50", "unpack ResNet-50", "scale ResNet-50", "add_n 8 many"):
        assert figures[name]["launches"] == 1, name


def took(tools, **seconds: float) -> dict:
    names = {"numpy": "gradreduce numpy", "chain": "numpy chain", "torch": "torch add_"}
    return {names.get(name, name): tools.clock.Took(taken, taken)
            for name, taken in seconds.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("sign", "bound", "holds"),
    [(">=", 1.5, True), (">=", 1.6, False), ("<=", 1.5, True), ("<=", 1.4, False)],
)
def test_a_floor_compares_with_a_peer(tools, sign, bound, holds):
    case = tools.case.Case("add", took=took(tools, numpy=2.0, chain=3.0, torch=2.5, copy=1.0))
    figure = tools.floors.times_the_peer("numpy chain", "numpy")
    floor = tools.floors.Floor("faster", "add", figure, sign, bound, "1.5", ("torch", "jax"))
    found = floor.check({"add": case}, {"jax": "not installed"})
    assert (found["figure"], found["holds"]) == (1.5, holds)
    assert found["without"] == ["jax: not installed"]


def test_a_floor_without_a_peer_is_not_kept_and_says_so(tools, capsys):
    case = tools.case.Case("add", took=took(tools, numpy=2.0, copy=1.0))
    alone = tools.floors.times_the_peer("cupy chain", "numpy")
    floor = tools.floors.Floor("faster", "add", alone, ">=", 2.2, "2.3", ("cupy",))
    (found,) = tools.floors.kept((floor,), {"add": case}, {"cupy": "no arithmetic"})
    assert found["holds"] is None
    printed = capsys.readouterr().out
    assert "not checked  faster" in printed
    assert "without cupy: no arithmetic" in printed


def test_a_copy_is_a_floor_of_time(tools):
    case = tools.case.Case("pack", took=took(tools, numpy=2.0, copy=1.5))
    assert tools.floors.of_the_copy("numpy")(case) == 0.75
    assert tools.floors.over_the_copy("numpy")(case) == pytest.approx(4 / 3)


@pytest.mark.parametrize("holds", [True, False, None])
def test_a_broken_floor_is_exit_status_1(tools, monkeypatch, tmp_path, holds):
    monkeypatch.setattr(tools.bench_ops, "meshes", dict)
    found = {"floors": [{"floor": "as fast as light", "holds": holds}]}
    monkeypatch.setattr(tools.bench_ops, "measured", lambda meshes, quick: found)
    report = tmp_path / "report.json"
    if holds is False:
        with pytest.raises(SystemExit, match="as fast as light"):
            tools.bench_ops.main(["--json", str(report)])
    else:
        tools.bench_ops.main(["--json", str(report)])
    assert json.loads(report.read_text(encoding="utf-8")) == found


def test_resnet_50_has_its_161_gradients(tools):
    shapes = tools.bench_ops.resnet50()
    sizes = [tools.bench_ops.np.prod(shape) for shape in shapes]
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
