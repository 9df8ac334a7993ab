"""Unequal batches: the weighted training is that of one batch, the mean of means is not."""

from pathlib import Path

import pytest
from support.examples import cells, is_picture, load_example

import gradreduce as gr

pytestmark = pytest.mark.repo


@pytest.fixture
def run(capsys):
    """Runs the example in this process; returns exit status, table, and text."""
    script = load_example("unequal_batches")

    def run_with(*flags):
        status = script.main(["--backend", "sim", *flags])
        text = capsys.readouterr().out
        return status, {row[0]: list(map(float, row[1:])) for row in cells(text)}, text

    return run_with


def test_the_weighted_training_is_that_of_one_batch(run):
    status, table, text = run("--steps", "20", "--placement", "0,0,1,1")
    assert status == 0
    none, weighted, mean_of_means = table["error of the first gradient"]
    assert none == 0
    assert weighted < 1e-6 < 0.1 < mean_of_means
    one, weighted, mean_of_means = table["loss on held-out sequences"]
    assert one == weighted < mean_of_means - 0.05
    assert "The weighted training is that of one batch, up to rounding." in text
    assert is_picture(Path("unequal_batches.png"))


def test_another_mean_is_an_error(run, monkeypatch):
    call = gr.SyncStep.__call__
    monkeypatch.setattr(
        gr.SyncStep, "__call__", lambda step, terms, weights=None: call(step, terms)
    )  # the sum of the terms
    status, _, text = run("--steps", "2", "--devices", "2", "--output", "other.png")
    assert status == 1
    assert "The losses of one batch and of weights= differ by" in text
