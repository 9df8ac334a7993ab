"""``bench/bench_ray.py`` runs, and has a figure for each floor."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_ray

    return bench_ray


def test_without_ray_no_floor_is_checked(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    report = bench.measured(quick=False)
    assert {one["holds"] for one in report["floors"]} == {None}
    assert all(one["without"] == ["ray: not installed"] for one in report["floors"])
    assert "ray: not installed" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.host
@pytest.mark.exhaustive
def test_every_floor_has_a_measured_value(bench, cluster, capsys):
    made = bench.Bench(quick=True)
    made.with_floors()
    made.accumulators(bench.SUMS, [(3,)] * 2)
    found = {floor.name: floor.check(made.cases, {})["figure"] for floor in bench.FLOORS}
    assert [name for name, figure in found.items() if figure is None] == []
    shown = capsys.readouterr().out
    assert all(name in shown for name in (bench.PUSH, bench.APPLY, bench.TAKE, bench.TRIP))
