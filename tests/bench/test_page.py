"""The pages of benchmarks are those of the committed figures."""

import json
from types import SimpleNamespace

import pytest
from support.background_runs import ROOT

pytestmark = pytest.mark.repo


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import bench_scaling
    import page
    import record

    return SimpleNamespace(page=page, record=record, bench_scaling=bench_scaling)


def report(**milliseconds: float) -> dict:
    """A report with one case, whose copy takes a millisecond."""
    took = {name.replace("_", " "): {"seconds": ms / 1e3} for name, ms in milliseconds.items()}
    case = {"name": "sum", "size": "8 floats", "nbytes": 64, "took": took, "figures": {"us": 7.25}}
    return {"load_average": 0.25, "absent": {"torch": "gone"}, "cases": [case]}


def test_the_pages_are_those_of_the_figures_and_every_floor_is_met(tools):
    tools.page.main(["--check"])
    text = tools.page.PAGE.with_name(tools.page.TABLES).read_text(encoding="utf-8")
    assert [name for name in tools.page.names() if f"## bench_{name}.py\n" not in text] == []
    for sweep in tools.page.SWEEPS:
        picture = tools.page.PAGE.with_name(tools.page.PICTURE.format(sweep))
        assert "<svg" in picture.read_text(encoding="utf-8")


def test_every_decision_is_about_a_floor_that_has_another_bound_now(tools):
    changed = [(name, each) for name, each, _ in tools.page.every_floor() if each.decision]
    page = tools.page.summary_page()
    assert changed
    for name, floor in changed:
        assert floor.bound != floor.decision.was
        assert floor.decision.why
        assert f"| {name}: {floor.name} | " in page


@pytest.fixture
def one_report(tools, tmp_path, monkeypatch):
    """Writes a report of bench_ops into an own folder, and the pages."""
    monkeypatch.setattr(tools.page, "RESULTS", tmp_path)
    monkeypatch.setattr(tools.page, "PAGE", tmp_path / "page.md")

    def written(content: dict, kind: str = "cpu") -> str:
        (tmp_path / kind).mkdir(exist_ok=True)
        text = tools.record.kept(content, "ops", "d", busy=True)
        (tmp_path / kind / "ops.json").write_text(text, encoding="utf-8")
        tools.page.write()
        return (tmp_path / tools.page.TABLES).read_text(encoding="utf-8")

    return written


def test_a_changed_figure_is_another_page(tools, tmp_path, one_report):
    lines = one_report(report(copy=1, gradreduce_numpy=2, torch=4)).splitlines()
    tools.page.main(["--check"])
    assert "| sum: 8 floats | 1 | numpy 2 (0.5) | torch 4 |" in lines
    assert "| sum: us | 7.25 |" in lines
    assert "Left out: torch (gone)." in lines
    path = tmp_path / "cpu" / "ops.json"
    path.write_text(path.read_text().replace("7.25", "8.5"), encoding="utf-8")
    with pytest.raises(SystemExit, match="is not that of"):
        tools.page.main(["--check"])


def test_figures_of_gpus_have_tables_of_their_own(tools, one_report, monkeypatch):
    on_cpu = report(copy=1, gradreduce_numpy=2)
    assert "GPU" not in one_report(on_cpu).partition("bench_ops.py\n")[2]
    monkeypatch.setattr(tools.record, "has_gpu", lambda: True)
    monkeypatch.setattr(tools.record, "gpu_name", lambda: "NVIDIA H100")
    lines = one_report(report(copy=1, gradreduce_cuda=4), "gpu").splitlines()
    assert "| sum: 8 floats | 1 | numpy 2 (0.5) |  |" in lines
    assert "| sum: 8 floats | 1 | cuda 4 (0.25) |  |" in lines
    assert [lines.count(f"| figure | {kind} |") for kind in ("CPU", "GPU")] == [1, 1]
    assert sum(line.startswith("**NVIDIA H100**; `python bench/bench_ops.py`") for line in lines)


@pytest.mark.parametrize(("mebibytes", "holds"), [(4.0, True), (4.5, False)])
def test_a_missed_floor_fails_the_check(tools, one_report, mebibytes, holds):
    """The floor is that of the source: no report has a bound."""
    found = report(copy=1)
    found["cases"][0] |= {"name": "memory", "figures": {"numpy MiB": mebibytes}}
    text = one_report(found)
    cells = f"| numpy: MiB besides the output | <= 4 | {mebibytes:.3g} | {4 / mebibytes:.2g} | "
    assert f"{cells}{'holds' if holds else '**missed**'} |" in text
    if holds:
        tools.page.main(["--check"])
        return
    with pytest.raises(SystemExit) as stopped:
        tools.page.main(["--check"])
    assert str(stopped.value) == (
        "missed floors: ops: numpy: MiB besides the output: meet them, or change them by a Decision"
    )


@pytest.mark.host
def test_the_sweeps_run_and_find_their_floor(tools, tmp_path, monkeypatch):
    monkeypatch.setattr("measure.runner.has_gpu", lambda: False)
    path = tmp_path / "report.json"
    tools.bench_scaling.BENCHMARK.main(["--quick", "--json", str(path)])
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    names = {case["name"].partition(",")[0] for case in cases}
    assert names == {*tools.page.SWEEPS, "host"}
    copied, *of_host = tools.bench_scaling.CPU_FLOORS
    largest = tools.bench_scaling.BYTES[-2]
    assert copied.case == f"bytes, {largest:,} in all"
    assert largest == 2**30
    assert {floor.case for floor in of_host} == {"host, 100,000 tensors"}
    one, ten = (case["figures"] for case in cases if case["name"].startswith("host"))
    for floor in of_host:
        found = [floor.figure(SimpleNamespace(figures=figures)) for figures in (one, ten)]
        assert None not in found
        assert "us" in floor.name or max(found) <= floor.bound
    for name in ("captured", "prepared"):  # whatever the number of tensors
        assert one[f"{name} step, Python calls"] == ten[f"{name} step, Python calls"]


def test_a_benchmark_without_figures_keeps_those_it_has(tools, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tools.record, "BENCH", tmp_path)
    program = tmp_path / "bench_slow.py"
    program.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    assert tools.record.run("slow", 0.05) is None
    assert capsys.readouterr().out == "slow: not measured (did not end in time)\n"
    text = "import sys\nopen(sys.argv[2], 'w').write({!r})\nsys.exit(1)\n"
    program.write_text(text.format('{"a": 1}'), encoding="utf-8")
    assert tools.record.run("slow", 20) == {"a": 1}
    program.write_text(text.format('{"cases": [], "absent": {"ray": "gone"}}'), encoding="utf-8")
    assert tools.record.run("slow", 20) is None
    assert capsys.readouterr().out == "slow: not measured (ray: gone)\n"
