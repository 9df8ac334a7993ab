"""``gradreduce bench``, on sizes that take no time."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

import gradreduce as gr
from gradreduce.cli import bench
from gradreduce.cli.app import command

QUICK = ("--backend", "sim", "--iterations", "1")


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


def test_the_table_has_the_columns_of_nccl_tests():
    lines = run("all-reduce", "--max-bytes", "1K").stdout.splitlines()
    heads = [line for line in lines if line.startswith("size")]
    assert [head.split() for head in heads] == [
        "size (B) count type redop time (us) algbw (GB/s) busbw (GB/s) #wrong".split()
    ]
    assert lines[-1] == "Simulated devices: times of NumPy on this machine's CPU."


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "bench.svg"
    assert run("add_n", "--max-bytes", "4K", "--plot", str(path)).exit_code == 0
    assert "<svg" in path.read_text()


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("add_n", "--max-bytes", "1K", "--plot", str(tmp_path / "bench.png"))
    assert result.exit_code == 1
    assert "pip install 'gradreduce[cli]'" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["--min-bytes", "0"],
        ["--min-bytes", "many"],
        ["--min-bytes", "2K", "--max-bytes", "1K"],
        ["--factor", "1"],
        ["--plot", "bench.txt"],
        ["--plot", "missing/bench.png"],
    ],
)
def test_wrong_arguments_are_the_parsers_error(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.output
