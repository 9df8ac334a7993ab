"""The same 64 micro-batches on many layouts: exact sums have the same bits, rounded ones do not."""

import subprocess
from dataclasses import replace

import pytest
from support.examples import cells, load_example

import gradreduce as gr

pytestmark = pytest.mark.repo


@pytest.fixture
def script():
    return load_example("same_bits")


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Trains two steps on layouts; returns exit status, digests of each layout, and text."""

    def run_with(layouts):
        monkeypatch.setattr(script, "layouts", lambda: layouts)
        status = script.main(["--steps", "2"])
        text = capsys.readouterr().out
        rows = [row for row in cells(text) if len(row) == 3]
        return status, {row[0]: tuple(row[1:]) for row in rows}, text

    return run_with


def test_exact_sums_have_the_same_bits_on_every_layout(script, run):
    layouts = [
        script.Layout(), script.Layout(devices=4), script.Layout(devices=4, packs=3),
        script.Layout("accumulators", 2, order=1), script.Layout("accumulators", 2, order=2),
    ]  # fmt: skip
    status, digests, text = run(layouts)
    assert status == 0
    assert list(digests) == list(map(str, layouts))
    rounded, exact = map(set, zip(*digests.values(), strict=True))
    assert len(exact) == 1
    assert len(rounded) == 4  # the number of packs changes no bit
    assert "5 layouts: 4 different results of rounded sums, 1 of exact ones." in text


def test_another_result_is_an_error(script, run, monkeypatch):
    def learn_faster(training, steps):
        training.optimizer = gr.GradientDescentOptimizer(1.0)
        return script.sync_step(training, steps)

    monkeypatch.setitem(script.WAYS, "accumulators", learn_faster)
    status, _, text = run([script.Layout(), script.Layout("accumulators")])
    assert status == 1
    assert "2 layouts: 2 different results of rounded sums, 2 of exact ones." in text


def test_layouts_are_for_the_installed_libraries(script, monkeypatch):
    launchers_without = {"": {"", "torchrun", "mpiexec"}, "torch": {"", "mpiexec"},
                         "mpi4py": {"", "torchrun"}}  # fmt: skip
    for missing, launchers in launchers_without.items():
        monkeypatch.setattr(script, "find_spec", lambda name, none=missing: name != none)
        monkeypatch.setattr(script, "which", lambda name: name)
        layouts = script.layouts()
        assert {each.launcher for each in layouts} == launchers
        assert len({*map(str, layouts)}) == len(layouts)
        assert all(each.devices * each.processes <= script.NUM_TERMS for each in layouts)


@pytest.mark.torch
@pytest.mark.slow
def test_processes_of_torchrun_have_the_bits_of_one(script):
    one = script.Layout(devices=4)
    two = [script.Layout(way, 2, 2, "torchrun") for way in ("SyncStep", "DataParallel")]
    expected = script.digest(one, 2, exact=True)
    assert [script.digests(each, 2)[1] for each in two] == [expected] * 2
    assert script.digest(replace(one, way="DataParallel"), 2, exact=True) == expected


def test_an_error_of_a_process_is_shown(script, monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "no rank 1")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: done)
    layout = script.Layout("SyncStep", 1, 2, "torchrun")
    with pytest.raises(RuntimeError, match="in each of 2 processes of torchrun failed:\nno rank 1"):
        script.digests(layout, 1)
