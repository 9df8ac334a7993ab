"""The studies of staleness and goodput: what they count, exactly, and what they print and save."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.examples import cells, is_picture, load_example, rows_of

import gradreduce as gr

pytestmark = pytest.mark.repo


@pytest.fixture(scope="module")
def study():
    return load_example("staleness_study")


@pytest.fixture(scope="module")
def runs():
    return importlib.import_module("staleness_runs")


@pytest.fixture(scope="module")
def models():
    return importlib.import_module("staleness_models")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rich._console", None)  # made anew: it keeps the width that it found


class Counting:
    """Each local step subtracts 1, so that with ``Mean(1)`` the center counts the steps."""

    def initial(self, seeds):
        return {"w": np.zeros((len(seeds), 3), "float32")}

    def gradient(self, values, random):
        return {"w": np.ones_like(values["w"])}

    def losses(self, values):
        return [-each[0] for each in values["w"]]


class Recorded(gr.center_rules.CenterRule):
    def __init__(self, ages):
        super().__init__()
        self.ages = ages

    def update(self, center, slots, push, age, weight):
        center -= push
        self.ages.append(age)


@pytest.mark.whole_product
@pytest.mark.parametrize("staleness", [0, 2, 8, 32])
def test_steps_ages_and_bytes_are_those_of_the_center(study, runs, monkeypatch, staleness):
    ages, num_workers = [], staleness + 1
    monkeypatch.setitem(runs.METHODS, "recorded", runs.Method(lambda case: Recorded(ages)))
    num_steps, num_seeds = 2 * study.STEP_UNIT, 2
    case = runs.Case("counting", "recorded", num_workers, num_steps, runs.Settings(1.0), num_seeds)
    found = runs.asynchronous(case, Counting())
    assert ages == [*range(num_workers), *[staleness] * (num_steps // 10 - num_workers)]
    assert found.steps == list(range(0, num_steps + 1, 330))
    assert found.losses == [[steps] * num_seeds for steps in found.steps]
    assert found.num_bytes == [12 * (num_workers + 2 * steps // 10) for steps in found.steps]

    found = runs.synchronous(case, Counting())
    assert found.losses == [[steps / num_workers] * num_seeds for steps in found.steps]
    assert found.num_bytes == [12 * (num_workers + 2 * steps) for steps in found.steps]
    assert (len(found.steps), found.steps[-1]) == (7, num_steps)


def test_gradients_by_hand_are_those_of_the_tape(models):
    example = importlib.import_module("digits")
    model, data = models.load("digits"), example.load()
    values = model.initial([0, 1])
    grads = model.gradient(values, np.random.default_rng(5))
    picks = np.random.default_rng(5).integers(len(data.train_images), size=(2, models.BATCH_SIZE))
    for repetition, pick in enumerate(picks):
        with gr.open_mesh(1, backend="sim") as mesh:
            variables = [
                gr.Variable(value[repetition], device=mesh.devices[0]) for value in values.values()
            ]
            _, wanted = example.loss_and_gradients(
                gr.GradientDescentOptimizer(1.0), variables,
                data.train_images[pick], data.train_labels[pick],
            )  # fmt: skip
        for grad, each in zip(grads.values(), wanted, strict=True):
            np.testing.assert_allclose(grad[repetition], np.asarray(each), rtol=1e-4, atol=1e-7)


def test_the_study_prints_and_saves_its_numbers(study, capsys):
    few = ["--steps", "990", "--seeds", "2", "--staleness", "0,8", "--processes", "1"]
    assert study.main(few) == 0
    text = capsys.readouterr().out
    losses = cells(text)[6:]
    assert [row[0] for row in losses] == list(study.ALL_METHODS)
    numbers = json.loads(Path("staleness_study.json").read_text("utf-8"))
    found = {(each["method"], each["staleness"]): each for each in numbers["trainings"]}
    assert len(found) == 12
    for (method, staleness), each in found.items():
        assert np.shape(each["losses"]) == (len(each["steps"]), 2)
        (row,) = [row for row in losses if row[0] == method]
        mean, half = each["mean"][-1], each["half_interval"][-1]
        diverged = sum(loss is None or loss > np.log(10) for loss in each["losses"][-1])
        shown = f"{diverged} of 2 diverged" if diverged else f"{mean:.3f} ± {half:.3f}"
        assert row[1 + [0, 8].index(staleness)] == shown
    for one, other in (("Mean", "StalenessScaled"), ("Nesterov", "DelayedNesterov")):
        assert found[one, 0]["losses"] == found[other, 0]["losses"]
        assert found[one, 8]["losses"] != found[other, 8]["losses"]
    first, second = found["AGN", 0]["losses"][-1]
    # Of two numbers: the quantile of t is 12.706, the standard error half of the difference.
    assert np.isclose(found["AGN", 0]["half_interval"][-1], 12.7062 * abs(first - second) / 2)
    assert is_picture(Path("staleness_study.png"))


def test_the_grid_fails_if_the_study_does_not_use_the_best(study, capsys, monkeypatch):
    good, bad = study.CHOSEN["digits"]["AGN"], study.Settings(1e-5)
    monkeypatch.setattr(study, "GRID", {"AGN": [bad, good]})
    few = ["--grid", "--steps", "990", "--processes", "1"]
    assert study.main(few) == 0
    assert [row[-1] for row in cells(capsys.readouterr().out)] == ["", "best"]
    monkeypatch.setitem(study.CHOSEN, "digits", {"AGN": bad})
    assert study.main(few) == 1
    assert f"For AGN {good} is better than what the study uses." in capsys.readouterr().out


def test_the_goodput_is_shown_for_each_quorum_and_grace(capsys, monkeypatch):
    goodput = load_example("goodput_study")
    monkeypatch.setattr(goodput, "SECONDS", 100.0)
    monkeypatch.setattr(goodput, "QUORUMS", (30, 40))
    assert goodput.main(["--seeds", "1", "--processes", "1"]) == 0
    rows = {name: row for name, *row in cells(capsys.readouterr().out)}
    assert list(rows) == ["30 of 40", "40 of 40", "no rounds"]
    found = json.loads(Path("goodput_study.json").read_text("utf-8"))
    assert Counter(each["quorum"] for each in found) == {None: 1, 30: 4, 40: 1}
    shown = [f"{each['goodput'][0]:.2f}" for each in found]
    assert shown == [rows["no rounds"][0], *rows["30 of 40"], rows["40 of 40"][0]]
    assert shown[-1] < min(shown[:-1])  # rounds of all wait for each crash
    assert is_picture(Path("goodput_study.png"))


@pytest.mark.torch
@pytest.mark.parametrize(
    "steps", [990, pytest.param(3960, marks=[pytest.mark.exhaustive, pytest.mark.slow])]
)
def test_a_character_model_learns(study, capsys, steps):
    threads = importlib.import_module("torch").get_num_threads()
    try:
        few = ["--model", "characters", "--seeds", "2", "--staleness", "0"]
        if steps == 3960:
            few = ["--model", "characters", "--seeds", "3", "--staleness", "0,8"]
        assert study.main([*few, "--steps", str(steps), "--processes", "1"]) == 0
    finally:
        importlib.import_module("torch").set_num_threads(threads)
    loss = float(rows_of(capsys.readouterr().out)["AGN"].split()[0])
    assert loss < 3.5  # a guess has 4.6


def test_without_torch_the_character_model_is_a_bad_flag(study, capsys, monkeypatch):
    for name in ("torch", "staleness_characters", "train_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit):
        study.main(["--model", "characters"])
    assert "allowed: digits, characters\n" in capsys.readouterr().err
