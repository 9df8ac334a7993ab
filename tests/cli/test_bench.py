"""``gradreduce bench``, on sizes that take no time."""

import json
import platform
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import gradreduce as gr
from gradreduce.backends import num_cores
from gradreduce.cli import bench, pictures
from gradreduce.cli.app import command
from gradreduce.cli.system_info import processor
from gradreduce.errors import counted
from gradreduce.reduce.algorithms import ALGORITHMS

QUICK = ("--backend", "sim", "--iterations", "1", "--rounds", "2")


def run(*arguments: str):
    return CliRunner().invoke(command, ["bench", *QUICK, *arguments])


def rows(*arguments: str):
    result = run("--json", "-", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


def test_the_sweep_has_the_sizes_that_were_asked_for():
    found = rows("all-reduce", "--min-bytes", "64", "--max-bytes", "2K", "--factor", "2",
                 "--devices", "3", "--op", "mean", "--dtype", "float64")  # fmt: skip
    assert [row["size"] for row in found] == [64, 128, 256, 512, 1024, 2048]
    for row in found:
        assert row["count"] * 8 == row["size"]
        assert (row["type"], row["redop"], row["wrong"]) == ("float64", "mean", 0)
        assert 0 < row["time_min"] <= row["time"] <= row["time_max"]
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)  # 2 (n - 1) / n


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_benchmark_has_the_right_results(dtype):
    found = rows("--max-bytes", "1K", "--dtype", dtype)
    names = ["all-reduce", "add_n", "accumulator", *bench._OPTIMIZERS]
    assert [row["benchmark"] for row in found] == names
    assert [row["wrong"] for row in found] == [0] * len(names)


def test_wrong_elements_are_counted(monkeypatch):
    def wrong_sum(terms):
        total = terms[0].numpy()
        total[2:4] = 7
        return terms[0].device.upload(total)

    monkeypatch.setattr(gr, "add_n", wrong_sum)
    (row,) = rows("add_n", "--min-bytes", "16", "--max-bytes", "16")
    assert row["wrong"] == 4  # two are another number, two are zero
    monkeypatch.setattr(gr.GradientDescentOptimizer, "apply_gradients", lambda self, pairs: None)
    assert rows("optimizers", "--max-bytes", "1K")[0]["wrong"] == 1


def test_the_table_has_the_columns_of_nccl_tests_and_names_the_machine(monkeypatch):
    monkeypatch.setenv("GRADREDUCE_SIM_THREADS", "3")
    lines = run("all-reduce", "--max-bytes", "1K").stdout.splitlines()
    heads = [line for line in lines if line.startswith("size")]
    columns = "size (B) count type redop time (us) min (us) max (us) algbw (GB/s) busbw (GB/s)"
    assert [head.split() for head in heads] == [[*columns.split(), "#wrong"]]
    assert lines[-2] == (
        f"{processor()}, {counted(num_cores(), 'core')}, 3 threads in each process; "
        f"gradreduce {gr.__version__}, Python {platform.python_version()}, NumPy {np.__version__}."
    )
    assert lines[-1] == "Simulated devices: times of NumPy on this machine's CPU."


def test_the_times_of_the_rounds_are_those_of_the_clock(monkeypatch):
    """Rounds of 4, 1 and 7 seconds, of two calls each."""
    times = [0, 4, 10, 11, 20, 27]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: times.pop(0))
    (row,) = rows("add_n", "--max-bytes", "1K", "--iterations", "2", "--rounds", "3")
    assert (row["time"], row["time_min"], row["time_max"]) == (2e6, 0.5e6, 3.5e6)


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_picture_has_logarithmic_axes(monkeypatch, tmp_path, devices):
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    path = tmp_path / "bench.svg"
    result = run("all-reduce", "--max-bytes", "4K", "--devices", devices, "--plot", str(path))
    assert result.exit_code == 0, result.output
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [1024, 4096]


def test_every_algorithm_can_be_chosen(monkeypatch):
    (option,) = [each for each in command.commands["bench"].params if each.name == "algorithm"]
    assert option.type.choices == tuple(ALGORITHMS)


def row_of(time, least, most, size=1024):
    return {
        "benchmark": "add_n", "size": size, "type": "float32", "redop": "sum",
        "time": time, "time_min": least, "time_max": most,
    }  # fmt: skip


def earlier_file(tmp_path, **changed):
    """A file of an earlier run with this version, machine and settings, but for what changed."""
    path = tmp_path / "earlier.json"
    assert run("add_n", "--max-bytes", "1K", "--json", str(path)).exit_code == 0
    content = json.loads(path.read_text()) | changed
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("before", "verdict"),
    [((1e-6, 1e-6, 1e-6), "slower"), ((1e9, 1e9, 1e9), "faster"), ((10, 1e-6, 1e9), "alike")],
)
def test_times_are_compared_with_those_of_an_earlier_file(tmp_path, before, verdict):
    path = earlier_file(tmp_path, rows=[row_of(*before), row_of(1, 1, 1, size=7)])
    arguments = ("add_n", "--max-bytes", "4K", "--against", str(path))
    result = run(*arguments, "--json", str(tmp_path / "new.json"))
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "new.json").read_text())["against"]
    assert (found["size"], found["before"], found["verdict"]) == (1024, before[0], verdict)
    assert found["ratio"] == found["time"] / before[0]
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["1 row is only in the earlier file", "1 row is only here"]
    assert lines[-3].split()[-1] == verdict
    assert lines[-5] == f"Compared with {path}"


def test_settings_and_machine_that_differ_are_named(tmp_path):
    machine = {"processor": "Z80", "cores": num_cores(), "threads": num_cores(),
               "versions": {"gradreduce": gr.__version__, "NumPy": "1.0"}}  # fmt: skip
    path = earlier_file(tmp_path, algorithm="hierarchical_copy", machine=machine)
    lines = run("add_n", "--max-bytes", "1K", "--against", str(path)).stdout.splitlines()
    assert lines[-4:] == [
        "algorithm was 'hierarchical_copy', and is 'nccl'",
        f"processor was 'Z80', and is {processor()!r}",
        f"NumPy was '1.0', and is {np.__version__!r}",
        f"Python was None, and is {platform.python_version()!r}",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'rows'"),
        ("[" * 20_000, "RecursionError"),
        (json.dumps({"rows": [row_of(1, 1, 1)]}), "KeyError: 'machine'"),
        (json.dumps({"rows": [row_of("1", 1, 1)]}), "are not times in microseconds"),
        (json.dumps({"rows": [row_of(1, 2, 3)]}), "[1, 2, 3] are not times in microseconds"),
        (json.dumps({"rows": [row_of(0, 0, 0)]}), "[0, 0, 0] are not times in microseconds"),
        (json.dumps({"rows": [row_of(1, 1, 1, size=[])]}), "TypeError: unhashable type"),
    ],
)
def test_a_file_that_is_no_earlier_run_is_one_line(tmp_path, text, says):
    path, written = tmp_path / "earlier.json", tmp_path / "new.json"
    path.write_text(text)
    result = run("add_n", "--against", str(path), "--json", str(written))
    assert (result.exit_code, written.exists()) == (1, False)
    assert result.output.startswith(f"Error: {path} is not a JSON file of gradreduce bench: ")
    assert says in result.output
    assert result.output.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("add_n", "--max-bytes", "1K", "--plot", str(tmp_path / "bench.png"))
    assert result.exit_code == 1
    assert "pip install 'gradreduce[cli]' (in a clone: pip install '.[cli]')" in result.output
