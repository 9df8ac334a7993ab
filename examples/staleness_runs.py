"""The trainings of the staleness study, each in one thread on a virtual clock.

``asynchronous`` is the part to copy: ``gr.simulate_center`` with the real center and its rules.
``synchronous`` is what they are compared with: a gradient exchange in every step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import staleness_models
from staleness_models import Model, Values

import gradreduce as gr
from gradreduce import center_rules

PERIOD = 10  # local steps between two pushes
EVALUATE_EVERY = 330  # steps of all workers together: 33 pushes
ALPHA = 0.1  # of StalenessScaled: the default of the library
SYNCHRONOUS = "synchronous"
# Each worker is a little slower than the one before it, so that they always push in this order:
# between a worker's pull and its push each other worker pushes once. So each age is the number of
# the other workers, but for the first pushes, whose ages are 0, 1, 2, …
ORDERED = gr.CenterFaults(slowest=1.0001)
LATENCY = 1e-7


class Settings(NamedTuple):
    """Hyperparameters of a method.

    Attributes:
        learning_rate: of the local steps, which are gradient descent; of AGN's center too.
        center_rate: the learning rate of the rule, if there is one.
        momentum: of the rule, if it has one.
    """

    learning_rate: float
    center_rate: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        model: see ``staleness_models.load``.
        method: a key of ``METHODS``, or ``SYNCHRONOUS``.
        num_workers: the staleness and 1.
        num_steps: of all workers together, a multiple of ``PERIOD * num_workers``.
        settings: hyperparameters.
        num_seeds: repetitions with other initial values and batches.
        for_grid: whether a part of the training set is held out instead of the test set.
    """

    model: str
    method: str
    num_workers: int
    num_steps: int
    settings: Settings
    num_seeds: int = 1
    for_grid: bool = False

    @property
    def first_seed(self) -> int:
        return 1000 if self.for_grid else 0


@dataclass
class Outcome:
    """The held-out losses of a training.

    Attributes:
        steps: local steps in the pushes that the center has applied, of all workers together.
        num_bytes: of the pushes and pulls of one repetition until then.
        losses: of the center's values then, one of each repetition.
    """

    steps: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)


class Method(NamedTuple):
    """A rule of the center (None: AGN), and what workers push."""

    rule: Callable[[Case], center_rules.CenterRule | None]
    push: Literal["gradient_mean", "delta"] = "delta"


METHODS = {
    "AGN": Method(lambda case: None, "gradient_mean"),
    "Mean": Method(lambda case: center_rules.Mean(case.settings.center_rate)),
    "StalenessScaled": Method(
        lambda case: center_rules.StalenessScaled(case.settings.center_rate, ALPHA)
    ),
    "Nesterov": Method(lambda case: center_rules.Nesterov(*case.settings[1:])),
    "DelayedNesterov": Method(
        lambda case: center_rules.DelayedNesterov(case.num_workers, *case.settings[1:])
    ),
}


def run(case: Case) -> Outcome:
    """Runs a training; equal cases give equal bits on one machine."""
    model = staleness_models.load(case.model, case.for_grid)
    with np.errstate(all="ignore"), warnings.catch_warnings():  # some diverge
        warnings.filterwarnings("ignore", "Nesterov diverges")
        if case.method == SYNCHRONOUS:
            return synchronous(case, model)
        return asynchronous(case, model)


def asynchronous(case: Case, model: Model) -> Outcome:
    """Trains with a center that applies each push when it arrives."""
    curve, method = Curve(case, model, PERIOD), METHODS[case.method]
    num_calls = Counter[int]()

    def gradient(values: Values, worker: int, random: np.random.Generator) -> Values:
        period, step = divmod(num_calls[worker], PERIOD)
        num_calls[worker] += 1
        if step == 0:  # it has just pulled: these are the values of the center after its push
            pushes = (period - 1) * case.num_workers + worker + 1 if period else 0
            curve.add(pushes * PERIOD, values)
        return model.gradient(values, random)

    result = gr.simulate_center(
        initial(case, model), gradient, num_workers=case.num_workers,
        num_pushes=case.num_steps // PERIOD // case.num_workers, period=PERIOD,
        learning_rate=case.settings.learning_rate, center_rule=method.rule(case), push=method.push,
        faults=ORDERED, latency=LATENCY, seed=case.first_seed,
    )  # fmt: skip
    curve.add(result.num_steps, result.values)
    return curve.outcome


def synchronous(case: Case, model: Model) -> Outcome:
    """Trains with the mean of all workers' gradients in each step."""
    curve, values = Curve(case, model, 1), initial(case, model)
    seeds = [[case.first_seed, worker] for worker in range(case.num_workers)]
    randoms = [np.random.default_rng(seed) for seed in seeds]
    for steps in range(0, case.num_steps, case.num_workers):
        curve.add(steps, values)
        grads = [model.gradient(values, random) for random in randoms]
        for name in values:
            mean = sum(grad[name] for grad in grads) / np.float32(case.num_workers)
            values[name] = values[name] - np.float32(case.settings.learning_rate) * mean
    curve.add(case.num_steps, values)
    return curve.outcome


def initial(case: Case, model: Model) -> Values:
    return model.initial(range(case.first_seed, case.first_seed + case.num_seeds))


class Curve:
    """Evaluates the center's values every ``EVALUATE_EVERY`` steps.

    Args:
        case: the training.
        model: its model.
        period: steps between two pushes of a worker.
    """

    def __init__(self, case: Case, model: Model, period: int) -> None:
        self.outcome = Outcome()
        self._model, self._next = model, 0
        self._case, self._period = case, period

    def add(self, steps: int, values: Values) -> None:
        if steps < self._next:
            return
        self._next = (steps // EVALUATE_EVERY + 1) * EVALUATE_EVERY
        # First all workers pull. A pull follows each push.
        num_messages = self._case.num_workers + 2 * (steps // self._period)
        message = sum(each.nbytes for each in values.values()) // self._case.num_seeds
        self.outcome.steps.append(steps)
        self.outcome.num_bytes.append(num_messages * message)
        self.outcome.losses.append(self._model.losses(values))
