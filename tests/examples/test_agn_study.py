"""The study of AGN: its claims, small; its table; and AGN by hand, which gives the same bits."""

import importlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.examples import cells, is_picture, load_example

pytestmark = pytest.mark.repo


@pytest.fixture(scope="module")
def study():
    return load_example("agn_study")


@pytest.fixture(scope="module")
def workers():
    return importlib.import_module("agn_workers")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A wide terminal: the claims stay on one line."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rich._console", None)  # made anew: it keeps the width that it found


def made_up(workers, claims):
    """Outcomes of which all six claims hold and the two do not."""
    usual = {"agn 40 10": 0.2, "downpour 10 15": 0.1, "downpour 20 40": 0.1, "agn 2 40": 0.5}

    def made(case):
        scaled = case.distance_scale is not None
        name = f"{'scaled' if scaled else case.method} {case.num_workers} {case.period}"
        curve = [(5, 0.1), (10, usual.get(name, 0.95))]  # the second is its last step
        return workers.Outcome(curve, [case.num_workers - 1], [np.zeros(3)])

    return {case: [made(case)] for claim in claims for case in claim.cases}


# What is run ---------------------------------------------------------------------------------


def test_agn_by_hand_gives_the_same_bits_as_the_library(study, workers):
    """At every evaluation, not only where a period of 1 makes them one."""
    digits = study.load()
    case = workers.Case("agn", 3, 4, 200, seed=5)
    library, by_hand = (
        workers.run(replace(case, method=name), digits) for name in ("agn", "by hand")
    )
    assert library.accuracies == by_hand.accuracies
    assert library.staleness == by_hand.staleness
    assert all(map(np.array_equal, library.weights, by_hand.weights))
    assert library.accuracy > 0.8
    other = workers.run(replace(case, seed=6, num_steps=20), digits)
    assert not np.array_equal(other.weights[0], library.weights[0])


@pytest.mark.exhaustive
def test_claims_that_hold_at_this_size_are_seen(study):
    claims = study.make_claims(700)
    _, downpour, sums, _, _, slow, elastic, _ = claims
    outcomes = study.run_all([downpour, slow, elastic], 1, 1)
    assert downpour.seen(outcomes) == ("equal bits", True)
    assert slow.seen(outcomes)[1]
    (agn,) = outcomes[elastic.cases[0]]
    assert elastic.cases[0] == sums.cases[1]
    assert agn.accuracy > 0.85
    assert np.mean(agn.staleness) == pytest.approx(9, rel=0.1)
    (total,) = study.run_all([replace(sums, cases=sums.cases[:1])], 1, 1)[sums.cases[0]]
    assert total.accuracy < agn.accuracy - 0.3
    assert not elastic.seen(outcomes)[1]


def test_the_schedule_is_that_of_workers_who_do_not_wait(workers):
    case = workers.Case("agn", 5, 10, 1000)
    turns, again = (list(itertools.islice(workers.schedule(case), 1000)) for _ in range(2))
    assert turns == again
    counts = np.bincount(turns)
    assert counts.shape == (5,)
    assert counts.min() > 180  # equally fast, on average
    assert any(one == other for one, other in itertools.pairwise(turns))  # but not in turn


# What is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool", ["threads", pytest.param("processes", marks=pytest.mark.exhaustive)]
)
def test_the_command_prints_the_table_and_saves_the_picture(study, capsys, monkeypatch, pool):
    """With two of them, which change nothing; so few steps that most of it fails."""
    if pool == "threads":  # a process imports the libraries for seconds
        threads = ThreadPoolExecutor(2)
        monkeypatch.setattr("process_pool.ProcessPoolExecutor", lambda *_: threads)
    assert study.main(["--steps", "10"]) == 1
    text = capsys.readouterr().out
    assert "100%" in text  # the progress bar
    found, claims = cells(text), study.make_claims(10)
    assert [row[0] for row in found] == [claim.text for claim in claims]
    alone = study.run_all(claims, 1, 1)
    assert [row[2] for row in found] == [claim.seen(alone)[0] for claim in claims]
    assert [row[3] for row in found[:2]] == ["NO", "yes"]
    assert "This claim does not hold: the staleness of a push is n-1 on average.\n" in text
    assert "This claim does not hold: AGN is better than AEASGD" not in text
    assert is_picture(Path("agn_study.png"))


def test_the_exit_status_is_0_if_the_six_hold(study, workers, monkeypatch, capsys):
    monkeypatch.setattr(study, "run_all", lambda claims, *rest: made_up(workers, claims))
    monkeypatch.setattr(study, "save_picture", lambda *rest: None)
    assert study.main(["--steps", "10", "--output", "a.png"]) == 0
    assert "Saved the figure as a.png." in capsys.readouterr().out
