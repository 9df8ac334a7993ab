"""The benchmarks run, on the simulation and on the stand-in for CuPy, and each floor has a figure.

What they measure is nothing to a test; that they compare what their floors name is.
"""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.background_runs import ROOT
from support.thread_group import run_processes

import gradreduce as gr

pytestmark = pytest.mark.repo

LIMIT_S = 240.0
# Their devices are simulated or GPUs; and what finds peers that need not be installed -> candidates
# that stand for them.
ON_DEVICES = {
    "accumulator": {"find_tensorflow_calls": ("tf apply + take",)},
    "agn": {"model.torch_steps": ("torch foreach and add", "torch fused and add")},
    "all_reduce": {
        "find_all_reduce_peers": ("tf one device", "tf hierarchical_copy", "torch sum, copies")
    },
    "ops": {},
    "optim": {"model.torch_steps": ("torch loop", "torch foreach", "torch fused")},
    "scaling": {},
}
# Cases that a quick run leaves out, because they are large.
LARGE = ("one tensor, ", "bytes, 1,073,741,824", "host, 100,000")
ELSEWHERE = {
    "backend": {"torch"},
    "processes": {"torch", "mpi4py"},
    "ray": {"ray"},
    "torch": {"torch"},
}


@pytest.fixture
def load(monkeypatch):
    """Imports a module of ``bench/``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


@pytest.fixture
def clock(load):
    return load("measure.clock")


def check_floors(floors, cases, absent) -> None:
    """Every floor has a figure if its library is here, and what it counts is right."""
    for floor in floors:
        if floor.case.startswith(LARGE):
            continue
        found = floor.check(cases, absent)
        assert found["figure"] is not None or found["without"], floor.name
        if any(word in floor.name for word in ("launches", "busiest", "MiB")):
            assert found["holds"], floor.name


@pytest.mark.host
@pytest.mark.parametrize("name", [name for name in ON_DEVICES if name != "scaling"])
def test_every_cpu_floor_has_a_measured_value(load, name, monkeypatch, capsys):
    bench = load(f"bench_{name}")
    monkeypatch.setattr(load("measure.runner"), "has_gpu", lambda: False)
    for place, candidates in ON_DEVICES[name].items():
        calls = dict.fromkeys(candidates, int)
        monkeypatch.setattr(f"bench_{name}.{place}", lambda *_, calls=calls, **__: dict(calls))
    made = bench.BENCHMARK.measured(quick=True)
    check_floors(bench.BENCHMARK.floors, made.cases, made.absent)
    assert "gradreduce compiled" in capsys.readouterr().out


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_DEVICES)
def test_it_runs_with_the_cupy_stub(load, name, tmp_path):
    report = tmp_path / "report.json"
    folders = [ROOT / "src", ROOT / "bench", ROOT / "tests"]
    script = str(ROOT / f"bench/bench_{name}.py")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fake_cupy", script, "--quick", "--json", str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["implementations"], found["floors"]) == (["cuda"], [])
    for library, why in found["absent"].items():
        assert f"{library}: {why}" in done.stdout
    # Neither the stand-in nor PyTorch has arithmetic on this GPU.
    absent = {"torch": "no GPU", **found["absent"]}
    floors = load(f"bench_{name}").BENCHMARK.gpu_floors
    check_floors(floors, load("page").cases_of(found), absent)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_without_its_library_no_floor_is_checked(load, name, monkeypatch, capsys):
    bench = load(f"bench_{name}")
    monkeypatch.setattr(load("measure.runner").importlib.util, "find_spec", lambda name: None)
    report = bench.BENCHMARK.report(quick=False)
    assert {one["holds"] for one in report["floors"]} == {None}
    for one in report["floors"]:
        assert one["without"][0].endswith(": not installed")
        assert one["without"][0] in capsys.readouterr().out or report["absent"]
    assert set(report["absent"]) == ELSEWHERE[name]


@pytest.mark.ray
@pytest.mark.host
@pytest.mark.exhaustive
def test_every_floor_of_ray_has_a_measured_value(load, cluster, capsys):
    bench, runner = load("bench_ray"), load("measure.runner")
    made = runner.Bench(quick=True)
    cases = bench.Cases(made)
    cases.run()
    check_floors(bench.FLOORS, made.cases, {})
    shown = capsys.readouterr().out
    assert all(name in shown for name in (bench.PUSH, bench.EXCHANGE, bench.TRIP))


@pytest.mark.torch
def test_benchmarks_of_torch_without_a_launcher_have_measured_values(load, capsys):
    bench, runner = load("bench_torch"), load("measure.runner")

    def work(group):
        with gr.open_mesh(1, backend="sim", process_group=group) as mesh:
            return bench.tiny_in_two(mesh, True), bench.held(mesh, True)

    made = runner.Bench(quick=True)
    bench.keep(made, bench.TINY_ALONE, bench.tiny_in_one_process(True))
    for name, found in zip((bench.TINY, bench.HELD), run_processes(2, work)[0], strict=True):
        bench.keep(made, name, found)
    launched = (bench.OVERLAP, bench.HOOK, bench.WEIGHTS)
    floors = [floor for floor in bench.FLOORS if floor.case not in launched]
    check_floors(floors, made.cases, {})
    assert 0 < made.cases[bench.HELD].figures[bench.BUCKETS] <= 1
    assert bench.PARALLEL in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["backend", "torch", "interop"])
def test_benchmarks_of_other_libraries_run(load, name):
    bench = load(f"bench_{name}")
    made = bench.BENCHMARK.measured(quick=True)
    check_floors(bench.FLOORS, made.cases, made.absent)


# What is timed ------------------------------------------------------------------------------------


def test_setup_before_a_call_is_not_timed(clock, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: None)

    def lasts(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    calls = {"alone": lasts(2.0), "after": clock.After(lasts(100.0), lasts(3.0))}
    assert clock.host_seconds(calls, 4, quick=True) == {"alone": 2.0, "after": 3.0}
    taken = clock.HostClock(quick=True, of_rounds=min).measure(calls, 8)
    assert [taken[name].seconds for name in calls] == [2.0, 3.0]


def test_candidates_take_turns_and_a_warm_up_does_not_count(clock):
    made = []

    def turn(name):
        return lambda: made.append(name) or {name: float(len(made))}

    taken = clock.in_turns([turn("ours"), turn("theirs")], 2, warm_ups=1)
    assert made == ["ours", "theirs"] * 3
    assert taken == {"ours": [3.0, 5.0], "theirs": [4.0, 6.0]}


@pytest.mark.parametrize("adds", [False, True])
def test_numpy_in_blocks_does_a_step(load, adds):
    rate, sizes, model = np.float32(0.1), (3, 100_000), load("measure.model_steps")
    step = model.sgd_in_blocks(sizes, adds=adds)
    before = [[array.copy() for array in arrays] for arrays in step.args[0]]
    step()
    assert sum(arrays[0].size for arrays in before) == sum(sizes)
    for (value, gradient, *sums), (updated, same, *summed) in zip(
        before, step.args[0], strict=True
    ):
        assert gradient.all()
        assert (gradient == same).all()
        assert (updated == value - rate * gradient).all()
        assert len(sums) == adds
        assert all((total == gradient).all() for total in summed)


# Wrong results ------------------------------------------------------------------------------------


class Frozen(gr.Optimizer):
    """Does not update the last element."""

    def _apply(self, variable, slots, gradient):
        variable[:-1] -= gradient[:-1]


@pytest.mark.parametrize("name", ["optim", "agn"])
def test_a_step_that_does_not_change_all_elements_is_refused(load, name):
    bench, model = load(f"bench_{name}"), load("measure.model_steps")
    with gr.open_mesh(1, backend="sim") as mesh:
        made = [lambda: Frozen("frozen"), [8], mesh.devices[0]]
        step = bench.Step(*made) if name == "optim" else bench.Worker(made[0], made[2], [8], 100)
        with pytest.raises(AssertionError, match="frozen: not every element"):
            model.check_updates("frozen", [step.updated()])


def test_a_result_that_is_not_the_mean_is_refused(load):
    module = load("measure.reductions")
    with gr.open_mesh(4, backend="sim") as mesh:
        reduction = module.Reduction(mesh, module.placed(mesh, [(3,), (5, 2)]))
        call = reduction.checked(reduction.plain)

        def wrong():
            results = call()
            mesh.devices[3].upload(np.zeros((5, 2), np.float32), out=results[1].buffers[3])
            return results

        with pytest.raises(AssertionError, match="tensor 1 on device 3 is not the mean"):
            reduction.checked(lambda: wrong)


def test_a_wrong_take_is_refused(load):
    check, right = load("bench_accumulator").check, np.ones(3, np.float32)
    check("right", right, right)
    with pytest.raises(AssertionError, match="wrong is not what NumPy makes it"):
        check("wrong", right * 2, right)


# Floors -------------------------------------------------------------------------------------------


@pytest.fixture
def parts(load, clock):
    """A case in which ours takes 2 s, NumPy's chain 3 s and a copy 1 s; and what floors are of."""
    seconds = {"gradreduce numpy": 2.0, "numpy chain": 3.0, "torch add_": 2.5, "copy": 1.0}
    cases = floors = load("measure.case")
    case = cases.Case("add", took=clock.took_of(seconds))
    return SimpleNamespace(case=case, floors=floors, Floor=floors.Floor, cases=cases)


@pytest.mark.parametrize(
    ("sign", "bound", "holds"),
    [(">=", 1.5, True), (">=", 1.6, False), ("<=", 1.5, True), ("<=", 1.4, False)],
)
def test_a_floor_compares_with_a_peer(parts, sign, bound, holds):
    figure = parts.floors.times("numpy chain", "numpy")
    floor = parts.Floor("faster", "add", figure, sign, bound, "1.5", ("torch", "jax"))
    found = floor.check({"add": parts.case}, {"jax": "not installed"})
    assert (found["figure"], found["holds"]) == (1.5, holds)
    assert found["without"] == ["jax: not installed"]
    assert parts.floors.times("copy", "numpy")(parts.case) == 0.5
    assert parts.floors.over("copy", "numpy")(parts.case) == 2


def test_a_floor_without_a_peer_is_not_kept_and_says_so(parts, capsys):
    alone = parts.floors.times("cupy chain", "numpy")
    floor = parts.Floor("faster", "add", alone, ">=", 2.2, "2.3", ("cupy",))
    (found,) = parts.floors.kept((floor,), {"add": parts.case}, {"cupy": "no arithmetic"})
    assert found["holds"] is None
    printed = capsys.readouterr().out
    assert "not checked  faster" in printed
    assert "without cupy: no arithmetic" in printed


@pytest.mark.parametrize("bound", [2, 1, None])
def test_a_broken_floor_is_exit_status_1(load, parts, tmp_path, bound):
    figure = parts.floors.over("copy", "numpy" if bound else "cuda")
    floor = parts.Floor("as fast as light", "add", figure, "<=", bound or 1, "2")
    benchmark = load("measure.runner").Benchmark(
        "A.", lambda bench: bench.keep(parts.case), (floor,)
    )
    report = tmp_path / "report.json"
    if bound == 1:
        with pytest.raises(SystemExit, match="as fast as light"):
            benchmark.main(["--json", str(report)])
    else:
        benchmark.main(["--json", str(report)])
    found = json.loads(report.read_text(encoding="utf-8"))
    assert [one["holds"] for one in found["floors"]] == [None if bound is None else bound == 2]
    assert [one["name"] for one in found["cases"]] == ["add"]
