"""A wrong flag of an example is one line, which says what is allowed."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

import gradreduce as gr

pytestmark = pytest.mark.repo

AGN = ("--mode", "agn")
# A script; a flag, what is wrong with it, and a word of the answer that tells what is allowed.
BAD_FLAGS = {
    "train_digits": [
        ("--devices", ["--devices", "0"], "1 to 64"),
        ("--devices", ["--devices", "2.5"], "1 to 64"),
        ("--devices", ["--devices"], "1 to 64"),
        ("--devices", [*AGN, "--workers", "2", "--devices", "3"], "1 to 64"),
        ("--mode", ["--mode", "async"], "sync, agn"),
        ("--workers", [*AGN, "--workers", "0"], "1 to 64"),
        ("--engine", [*AGN, "--engine", "mpi"], "threads, ray"),
        ("--engine", ["--engine", "ray"], "threads, ray"),
        ("--devices", [*AGN, "--engine", "ray", "--devices", "4"], "1 to 64"),
        ("--period", [*AGN, "--period", "0"], "1 to 10000"),
        ("--replicas", [*AGN, "--replicas", "0"], "1 to 64"),
        ("--replicas", [*AGN, "--workers", "9", "--replicas", "9"], "1 to 64"),
        ("--backend", ["--backend", "gpu"], "auto, sim, cuda"),
        ("--placement", ["--placement", "0,0,1"], "each device"),
        ("--placement", ["--placement", "0,0,1,1", "--devices", "3"], "each device"),
        ("--placement", ["--placement", "0,a,1,1"], "0 to 63"),
        ("--placement", ["--placement", "0,0,-1,1"], "0 to 63"),
        ("--placement", ["--placement", ""], "0 to 63"),
        ("--kernels", ["--kernels", "cuda"], "numpy, compiled"),
        ("--micro-batches", ["--micro-batches", "0"], "1 to 64"),
        ("--aggregation", ["--aggregation", "sum"], "add_n, tree, accumulate_n"),
        ("--all-reduce", ["--all-reduce", "a\nb"], "hierarchical_copy, nccl"),
        ("--num-packs", ["--num-packs", "-1"], "0 to 1000"),
        ("--steps", ["--steps", "0"], "1 to 10000"),
        ("--learning-rate", ["--learning-rate", "nan"], "1e-6 to 10"),
        ("--learning-rate", ["--learning-rate", "0"], "1e-6 to 10"),
        ("--optimizer", ["--optimizer", "lbfgs"], "sgd"),
        ("--seed", ["--seed", "-1"], "0 to 4294967295"),
        ("--output", ["--output", "no such folder/digits.png"], ".png"),
        ("--output", ["--output", "."], ".png"),
        ("--output", ["--output", "digits.jpg"], ".png"),
        ("--save-weights", ["--save-weights", "weights.npy"], ".npz"),
        ("--num-pack", ["--num-pack", "1"], "--num-packs"),
        ("red", ["red"], "--num-packs"),
    ],
    "sync_replicas": [
        ("--workers", ["--workers", "0"], "1 to 64"),
        ("--replicas-to-aggregate", ["--replicas-to-aggregate", "0"], "1 to 64"),
        ("--stragglers", ["--stragglers", "-1"], "backup workers"),
        ("--stragglers", ["--stragglers", "2"], "backup workers"),
        ("--stragglers", ["--stragglers", "1", "--replicas-to-aggregate", "5"], "backup workers"),
        ("--late-every", ["--late-every", "0"], "1 to 10000"),
        ("--lag", ["--lag", "0"], "1 to 10000"),
        ("--backend", ["--backend", "gpu"], "auto, sim, cuda"),
        ("--placement", ["--placement", "0,0,1,1"], "each worker"),
        ("--kernels", ["--kernels", "cuda"], "numpy, compiled"),
        ("--steps", ["--steps", "0"], "1 to 10000"),
        ("--learning-rate", ["--learning-rate", "nan"], "1e-6 to 10"),
        ("--seed", ["--seed", "-1"], "0 to 4294967295"),
        ("--output", ["--output", "digits.jpg"], ".png"),
    ],
    "agn_study": [
        ("--steps", ["--steps", "0"], "1 to 100000"),
        ("--seeds", ["--seeds", "x"], "1 to 100"),
        ("--processes", ["--processes", "0"], "1 to 64"),
        ("--output", ["--output", "study.jpg"], ".png"),
    ],
}


def stopped_by(script, arguments, capsys) -> str:
    """The one line on stderr of a run that ends with status 2."""
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert re.fullmatch(r"[^\n]+\n", answer.err), answer.err
    return answer.err


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_bad_flag_gets_one_line_and_status_2(name, capsys):
    script = importlib.import_module(name)
    for flag, arguments, allowed in BAD_FLAGS[name]:
        error = stopped_by(script, arguments, capsys)
        assert flag in error
        assert allowed in error.partition("allowed: ")[2]
    assert set(script.make_parser().allowed) <= {flag for flag, _, _ in BAD_FLAGS[name]}


def test_the_line_has_the_value_and_what_is_allowed(capsys):
    script = importlib.import_module("train_digits")
    error = stopped_by(script, ["--all-reduce", "foo"], capsys)
    assert error.endswith(": --all-reduce: got 'foo'; allowed: hierarchical_copy, nccl\n")


@pytest.mark.parametrize(
    ("name", "flags", "hint"),
    [
        ("train_digits", AGN, "pip install 'gradreduce[ray]' (in a clone: pip install '.[ray]')"),
        pytest.param("agn_torch", (), "pip install 'gradreduce[ray]'", marks=pytest.mark.torch),
    ],
)
def test_without_ray_the_engine_is_a_bad_flag(name, flags, hint, capsys, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "agn_ray", raising=False)
    error = stopped_by(script, [*flags, "--engine", "ray"], capsys)
    assert f"{hint}; allowed: threads, ray\n" in error


@pytest.mark.parametrize("flags", [["--backend", "cuda"], []])
def test_a_backend_that_is_not_there_is_a_bad_flag(flags, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise gr.errors.BackendUnavailableError("no GPU here;\ninstall one")

    script = importlib.import_module("train_digits")
    monkeypatch.setattr(gr, "open_mesh", refuse)
    error = stopped_by(script, flags, capsys)
    assert re.search(r"--backend.*no GPU here; install one.*allowed: auto, sim, cuda", error)
