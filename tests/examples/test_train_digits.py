"""The digits example keeps its promises: accuracy, equal bits, honest counts, one-line faults."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from support import examples
from support.examples import is_picture, load_example, rows_of
from support.processes import run

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

pytestmark = pytest.mark.repo

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"
PLACEMENTS = ("0,1,2,3", "0,0,1,1", "0,1,0,1", "0,0,0,0")
STEPS = 3
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture(scope="module")
def script():
    return load_example("train_digits")


@pytest.fixture(scope="module")
def digits(script):
    return script.load()


def train(script, digits, *flags: str):
    return examples.train(script, digits, "--steps", str(STEPS), *flags)


def digest(weights: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for value in weights.values())).hexdigest()[:16]


# What it promises --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.early(str(SCRIPT), **PLAIN)
def test_the_plain_command_reaches_the_goal(early):
    # Without a flag, so that the defaults are what is tested; only the backend is kept off GPUs.
    assert (early.returncode, early.stderr) == (0, "")
    assert "100%" in early.stdout  # the progress bar
    rows = rows_of(early.stdout)
    assert float(rows["test accuracy"]) >= 0.95
    assert float(rows["steps/s"]) > 0
    assert is_picture(early.folder / "train_digits.png")


@pytest.mark.parametrize("name", ["train_digits", "sync_replicas"])
def test_a_run_that_misses_the_goal_says_so_and_exits_with_1(name, capsys):
    assert load_example(name).main(["--backend", "sim", "--steps", "1"]) == 1
    assert "below 0.95" in capsys.readouterr().out
    assert Path(f"{name}.png").is_file()


def test_every_optimizer_learns_and_no_two_have_equal_results(script, digits):
    flags = ("--micro-batches", "2", "--steps", "60", "--optimizer")
    found = {name: train(script, digits, *flags, name) for name in script.OPTIMIZERS}
    assert min(history.accuracy for history in found.values()) > 0.8
    assert len({history.digest for history in found.values()}) == 3
    rated = train(script, digits, *flags, "momentum", "--learning-rate", "0.1")
    assert rated.digest == found["momentum"].digest
    assert train(script, digits, *flags, "adam", "--learning-rate", "0.1").digest != (
        found["adam"].digest
    )


def test_the_seed_alone_decides_in_every_process(script, digits, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    flags = ("--backend", "sim", "--steps", str(STEPS), "--seed", "3")
    done = run("none", 1, str(SCRIPT), *flags)
    expected = train(script, digits, "--seed", "3").digest
    assert done.returncode == 1, done.text  # the goal is missed
    assert rows_of(done.text)["digest of the weights"] == expected
    assert train(script, digits, "--seed", "4").digest != expected


def test_saved_weights_are_those_of_the_digest(script, capsys):
    flags = ["--backend", "sim", "--steps", "2", "--output", "a.png", "--save-weights", "w.npz"]
    script.main(flags)
    with np.load("w.npz") as saved:
        weights = {name: saved[name] for name in saved.files}
    assert list(weights) == ["hidden/kernel", "hidden/bias", "output/kernel", "output/bias"]
    assert rows_of(capsys.readouterr().out)["digest of the weights"] == digest(weights)
    assert sorted(path.name for path in Path().iterdir()) == ["a.png", "w.npz"]


@pytest.mark.parametrize("all_reduce", ALGORITHMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_table_counts_what_the_journal_counts(
    script, capsys, monkeypatch, all_reduce, placement
):
    journals = []
    original = gr.SyncStep.__call__

    def counting(step, *arguments):
        with step.devices[0].mesh.journal() as journal:
            journals.append(journal)
            return original(step, *arguments)

    monkeypatch.setattr(gr.SyncStep, "__call__", counting)
    script.main(["--backend", "sim", "--steps", "4", "--all-reduce", all_reduce,
                 "--placement", placement])  # fmt: skip
    assert len(journals) == 4
    rows = rows_of(capsys.readouterr().out)
    counted = {name: float(rows[f"{name} per step"]) for name in ("launches", "copies", "bytes")}
    for name, count in counted.items():
        assert count == sum(getattr(journal, name) for journal in journals) / 4
    assert counted["launches"] > 0
    assert (counted["bytes"] > 0) == (placement != "0,0,0,0")
