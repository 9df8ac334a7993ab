"""Centers under simulated failures: exactly once, replays, and useful work."""

import resource
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import gradreduce as gr
from gradreduce import center_rules as rules

FAULTS = gr.CenterFaults(
    slowest=3, crashes=0.1, restart_seconds=15, lost=0.1, repeated=0.1, late=0.05,
    partitions=[(10, 40, 0.3), (35, 60, 0.1)],
)  # fmt: skip


def one_hot(values, worker, random):
    """Each push of a worker, applied by ``Mean(1)``, subtracts 1 from its element."""
    grad = np.zeros_like(values["w"])
    grad[worker] = 1
    return {"w": grad}


def counted(num_workers, num_pushes=10, seed=0, gradient=one_hot, **options):
    options = {"center_rule": rules.Mean(1.0), "faults": FAULTS, **options}
    start = {"w": np.zeros(num_workers, "float32")}
    return gr.simulate_center(
        start, gradient, num_workers=num_workers, num_pushes=num_pushes, period=2, seed=seed,
        **options,
    )  # fmt: skip


def check_counts(run, computed, num_pushes=10):
    """Every push that a worker has an answer to was applied, and no push twice."""
    assert (-run.values["w"]).tolist() == run.applied
    assert all(run.applied[task] <= computed[task] / 2 for task in computed)
    assert set(run.acknowledged) == {num_pushes}
    assert all(each >= num_pushes for each in run.applied)
    assert run.num_pushes == sum(run.applied) > num_pushes * len(run.applied)  # crashes
    assert run.num_steps == 2 * run.num_pushes


def test_500_workers_lose_nothing():
    computed = Counter()

    def gradient(values, worker, random):
        computed[worker] += 1
        return one_hot(values, worker, random)

    check_counts(counted(500, gradient=gradient), computed)


@pytest.mark.exhaustive
def test_10000_workers_lose_nothing():
    begin = time.process_time()
    run = gr.simulate_center(
        {"w": np.zeros(1, "float32")}, lambda values, worker, random: {"w": np.ones(1, "float32")},
        num_workers=10_000, num_pushes=10, period=2, faults=FAULTS, center_rule=rules.Mean(1.0),
    )  # fmt: skip
    assert run.values["w"] == [-sum(run.applied)]
    assert set(run.acknowledged) == {10}
    assert time.process_time() - begin < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1e6  # kB


@pytest.mark.parametrize("grace", [0.0, 5.0])
@pytest.mark.parametrize("max_staleness", [None, 10])
def test_rounds_lose_nothing(grace, max_staleness):
    """A round applies the mean of its pushes, so the sum of the center counts rounds."""
    run = counted(40, num_required=30, grace=grace, max_staleness=max_staleness)
    assert set(run.acknowledged) == {10}
    assert np.isclose(-run.values["w"].sum(), run.num_updates)
    assert run.num_updates < run.num_pushes / 10
    assert (run.num_dropped > 0) is (max_staleness is not None)


@pytest.mark.parametrize("options", [{}, {"num_required": 15, "grace": 2.0}], ids=str)
def test_a_run_replays_bit_for_bit(options):
    runs = [counted(20, seed=seed, **options) for seed in (3, 3, 4)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].values["w"].tobytes() == runs[1].values["w"].tobytes()
    assert replace(runs[0], values={}) == replace(runs[1], values={})


def test_a_quorum_keeps_the_work_that_lock_step_loses():
    faults = gr.CenterFaults(slowest=1.1, crashes=0.02, restart_seconds=30, lost=0.01)

    def steps(num_required, grace, faults):
        return gr.simulate_center(
            {"w": np.zeros(1, "float32")}, lambda values, worker, random: {"w": np.ones(1)},
            num_workers=40, seconds=400, center_rule=rules.Mean(0.1),
            num_required=num_required, grace=grace, faults=faults,
        ).num_steps  # fmt: skip

    whole = steps(40, 0.0, gr.CenterFaults(slowest=1.1))
    assert steps(40, 0.0, faults) / whole <= 0.6
    assert steps(30, 1.0, faults) / whole >= 0.85


def test_gradients_do_not_depend_on_faults():
    seen = []

    def gradient(values, worker, random):
        seen.append((worker, random.random()))
        return {"w": np.ones(1)}

    for faults in (gr.CenterFaults(), FAULTS):
        gr.simulate_center({"w": np.zeros(1)}, gradient, num_workers=3, num_pushes=4, period=2,
                           faults=faults)  # fmt: skip
    whole = sorted(seen[: 3 * 4 * 2])
    assert set(whole) <= set(seen[3 * 4 * 2 :])


def test_agn_without_a_rule_learns():
    run = gr.simulate_center(
        {"w": np.zeros(2)}, lambda values, worker, random: {"w": values["w"] - [1.0, 2.0]},
        num_workers=10, num_pushes=30, faults=FAULTS,
    )  # fmt: skip
    assert np.allclose(run.values["w"], [1, 2], atol=1e-3)
    assert run.num_updates == run.num_pushes


def test_wrong_arguments():
    def run(start=1.0, **options):
        options = {"num_workers": 2, "num_pushes": 1, **options}
        gr.simulate_center({"w": np.full(2, start)}, one_hot, **options)

    with pytest.raises(ValueError, match="num_pushes=None needs seconds=: the simulation would"):
        run(num_pushes=None)
    with pytest.raises(ValueError, match="num_required=3 of the center is more than num_worker=2"):
        run(num_required=3, center_rule=rules.Mean())
    with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
        run(num_workers=0)
    with pytest.raises(ValueError, match="step_seconds=0 must be above 0"):
        run(step_seconds=0)
    with pytest.raises(ValueError, match="Invalid type int64 of a trainable variable"):
        run(start=1)
