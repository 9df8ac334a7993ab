"""Tests the claims of the AGN paper (arXiv 1710.02368) on handwritten digits.

Asynchronous training is simulated in one process: an event queue orders the steps, so that results
depend only on the seed. AGN is the library's, with gradient descent as inner optimizer; with it
TensorFlow's rule equals the paper's. n is the number of workers, λ the communication period. A
claim compares trainings with the same total number of steps. ``agn_workers.py`` has the workers,
the schedule, and the methods that AGN is compared with.

The exit status is 0 if the six claims hold that are known to hold here. The table shows the two
other claims too, but they do not count. Speed is not measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import rich
from agn_workers import Case, Outcome, run
from command_line import Parser, file, in_range
from digits import load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from process_pool import outcomes_of
from rich.progress import Progress
from rich.table import Table

DISTANCE_SCALE = 1e-4
STALENESS_TOLERANCE = 0.05
DIVERGED, TRAINED = 0.5, 0.9  # test accuracies: below, above
HURT = 0.15  # of accuracy
SLOWED = 1.5  # times as many steps
BETTER = 0.01  # of accuracy


# The claims ------------------------------------------------------------------------------------

Outcomes = Mapping[Case, Sequence[Outcome]]  # of each case, one of each seed


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        text: the claim.
        expected: the expected result.
        cases: trainings for it, without seeds.
        judge: returns the result as text, and whether it is the expected one.
        is_known_to_fail: whether the claim is known not to hold here.
    """

    text: str
    expected: str
    cases: tuple[Case, ...]
    judge: Callable[[list[Sequence[Outcome]]], tuple[str, bool]]
    is_known_to_fail: bool = False

    def seen(self, outcomes: Outcomes) -> tuple[str, bool]:
        return self.judge([outcomes[case] for case in self.cases])


def make_claims(num_steps: int) -> list[Claim]:
    """Returns the eight claims.

    Args:
        num_steps: of all workers of a training together; twice as many with forty workers.
    """
    usual = Case("agn", 10, 15, num_steps)
    crowd = Case("agn", 40, 10, 2 * num_steps)
    return [*claims_of_the_rule(usual, crowd), *claims_of_the_period(usual, crowd),
            *claims_of_others(usual)]  # fmt: skip


def claims_of_the_rule(usual: Case, crowd: Case) -> list[Claim]:
    each = Case("agn", 4, 1, max(1, usual.num_steps // 10))
    long = replace(usual, num_workers=20, period=40)
    return [
        Claim(
            "the staleness of a push is n-1 on average",
            f"n=10 and 40: within {STALENESS_TOLERANCE:.0%}",
            (usual, crowd),
            judge_staleness,
        ),
        Claim(
            "with λ=1 it is DOWNPOUR",
            "n=4: equal bits",
            (each, replace(each, method="downpour")),
            judge_equality,
        ),
        Claim(
            "sums that are not normalised diverge where AGN does not",
            f"n=10, λ=15 and n=20, λ=40: below {DIVERGED:.0%}, AGN above {TRAINED:.0%}",
            (replace(usual, method="downpour"), usual, replace(long, method="downpour"), long),
            judge_divergence,
        ),
    ]


def claims_of_the_period(usual: Case, crowd: Case) -> list[Claim]:
    few = Case("agn", 2, 10, max(1, usual.num_steps // 2))
    return [
        Claim(
            "many workers with a small λ hurt AGN",
            f"n=40: λ=10 {HURT:.0%} below λ=40",
            (crowd, replace(crowd, period=40)),
            judge_hurt,
        ),
        Claim(
            "scaling by distance repairs that",
            f"n=40, λ=10: above {TRAINED:.0%}, {HURT:.0%} above AGN without",
            (replace(crowd, distance_scale=DISTANCE_SCALE), crowd),
            judge_repair,
        ),
        Claim(
            "a large λ slows few workers",
            f"n=2: λ=40 needs {SLOWED} times the steps of λ=10 to {TRAINED:.0%}",
            (replace(few, period=40), few),
            judge_slowness,
        ),
    ]


def claims_of_others(usual: Case) -> list[Claim]:
    return [
        Claim(
            "AGN is better than AEASGD",
            f"n=10, λ=15: {BETTER:.0%} above",
            (usual, replace(usual, method="aeasgd")),
            judge_better,
            is_known_to_fail=True,
        ),
        Claim(
            "DynSGD diverges",
            f"n=10, λ=15: below {DIVERGED:.0%}",
            (replace(usual, method="dynsgd"),),
            judge_collapse,
            is_known_to_fail=True,
        ),
    ]


def mean_accuracy(outcomes: Sequence[Outcome]) -> float:
    """Returns the mean final accuracy over the seeds."""
    return float(np.mean([outcome.accuracy for outcome in outcomes]))


def mean_staleness(outcomes: Sequence[Outcome]) -> float:
    """Returns the mean staleness; NaN if no worker has pushed twice."""
    found = [each for outcome in outcomes for each in outcome.staleness]
    return float(np.mean(found)) if found else float("nan")


def steps_to_train(outcomes: Sequence[Outcome]) -> float:
    """Returns the steps until the accuracy is above ``TRAINED``; infinite if it never is."""
    needed = [
        next((step for step, accuracy in outcome.accuracies if accuracy > TRAINED), float("inf"))
        for outcome in outcomes
    ]
    return float(np.mean(needed))


def judge_staleness(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    ten, forty = map(mean_staleness, found)
    furthest = np.max(np.abs([ten / 9 - 1, forty / 39 - 1]))  # NaN if one is
    return f"{ten:.2f}; {forty:.2f}", bool(furthest <= STALENESS_TOLERANCE)


def judge_equality(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    pairs = zip(*found, strict=True)
    equal = all(
        np.array_equal(one, two)
        for agn, downpour in pairs
        for one, two in zip(agn.weights, downpour.weights, strict=True)
    )
    return "equal bits" if equal else "other bits", equal


def judge_divergence(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    sums, means = map(mean_accuracy, found[0::2]), map(mean_accuracy, found[1::2])
    pairs = list(zip(sums, means, strict=True))
    text = "; ".join(f"{total:.1%}, AGN {mean:.1%}" for total, mean in pairs)
    return text, all(total < DIVERGED and mean > TRAINED for total, mean in pairs)


def judge_hurt(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    short, long = map(mean_accuracy, found)
    return f"{short:.1%}, λ=40 {long:.1%}", short <= long - HURT


def judge_repair(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    scaled, plain = map(mean_accuracy, found)
    return f"{scaled:.1%}, without {plain:.1%}", scaled > max(TRAINED, plain + HURT)


def judge_slowness(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    long, short = map(steps_to_train, found)
    return f"{long:.0f} steps, λ=10 {short:.0f}", long >= SLOWED * short < float("inf")


def judge_better(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    agn, elastic = map(mean_accuracy, found)
    return f"{agn:.1%}, AEASGD {elastic:.1%}", agn >= elastic + BETTER


def judge_collapse(found: list[Sequence[Outcome]]) -> tuple[str, bool]:
    accuracy = mean_accuracy(found[0])
    return f"{accuracy:.1%}", accuracy < DIVERGED


# The runs --------------------------------------------------------------------------------------


def run_all(claims: Sequence[Claim], num_seeds: int, num_processes: int) -> Outcomes:
    """Runs every case once per seed, with a progress bar."""
    cases = list(dict.fromkeys(case for claim in claims for case in claim.cases))
    seeded = [replace(case, seed=seed) for seed in range(num_seeds) for case in cases]
    seeded.sort(key=lambda case: -case.num_steps)  # so that the processes end together
    found: dict[Case, Outcome] = {}
    with Progress() as progress:
        bar = progress.add_task("training", total=sum(case.num_steps for case in seeded))
        for case, outcome in outcomes_of(run_one, seeded, num_processes):
            found[case] = outcome
            progress.advance(bar, case.num_steps)
    return {case: [found[replace(case, seed=seed)] for seed in range(num_seeds)] for case in cases}


def run_one(case: Case) -> Outcome:
    return run(case, _digits())


_digits = cache(load)


# The report ------------------------------------------------------------------------------------


def verdict(claim: Claim, holds: bool) -> str:
    """Returns the last cell of a table row."""
    if claim.is_known_to_fail:
        return "yes, unexpectedly" if holds else "no, as expected"
    return "yes" if holds else "NO"


def report(claims: Sequence[Claim], outcomes: Outcomes, title: str) -> list[Claim]:
    """Prints the table; returns the claims that should hold and do not."""
    table = Table("claim", "expected", "seen", "holds", title=title, show_lines=True)
    failed = []
    for claim in claims:
        text, holds = claim.seen(outcomes)
        table.add_row(claim.text, claim.expected, text, verdict(claim, holds))
        if not holds and not claim.is_known_to_fail:
            failed.append(claim)
    rich.print(table)
    return failed


NAMES = {"agn": "AGN", "aeasgd": "AEASGD", "dynsgd": "DynSGD"}


def label(case: Case) -> str:
    """Returns the legend text of a case."""
    name = NAMES.get(case.method, "DOWNPOUR" if case.period == 1 else "not normalised")
    scaled = ", scaled" if case.distance_scale is not None else ""
    return f"{name}{scaled}, n={case.num_workers}, λ={case.period}"


def save_picture(claims: Sequence[Claim], outcomes: Outcomes, path: Path) -> None:
    """Saves a figure with a panel per claim: one of staleness, the others of accuracy."""
    figure = Figure(figsize=(15, 7), layout="constrained")
    first, *others = figure.subplots(2, 4).flat
    draw_staleness(first, claims[0], outcomes)
    for panel, claim in zip(others, claims[1:], strict=True):
        draw_accuracies(panel, claim.text, claim.cases, outcomes)
    figure.savefig(path, dpi=110)


def draw_staleness(panel: Axes, claim: Claim, outcomes: Outcomes) -> None:
    for case in claim.cases:
        found = [each for outcome in outcomes[case] for each in outcome.staleness]
        shares = np.full(len(found), 1 / max(1, len(found)))
        (*_, bars) = panel.hist(found, range(81), weights=shares, alpha=0.6, label=label(case))
        panel.axvline(case.num_workers - 1, color=bars[0].get_facecolor(), linestyle="--")
    panel.set(xlabel="others' pushes between pull and push", ylabel="share")
    panel.set_title(claim.text, fontsize="medium")
    panel.legend(fontsize="small")


def draw_accuracies(panel: Axes, title: str, cases: Iterable[Case], outcomes: Outcomes) -> None:
    """Draws the mean accuracy over the seeds."""
    for case in cases:
        curves = np.array([outcome.accuracies for outcome in outcomes[case]])
        style = "--" if case.method == "downpour" else "-"
        panel.plot(*curves.mean(axis=0).T, style, label=label(case))
    panel.set(xlabel="steps of all workers", ylabel="test accuracy", ylim=(0, 1))
    panel.set_title(title, fontsize="medium")
    panel.legend(fontsize="small")


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--steps", 4000, in_range(int, 1, 100_000), "1 to 100000",
         "total steps of a training; twice as many with forty workers")  # fmt: skip
    flag("--seeds", 1, in_range(int, 1, 100), "1 to 100", "number of runs of each training")
    flag("--processes", 2, in_range(int, 1, 64), "1 to 64", "number of processes")
    flag("--output", "agn_study.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the six claims hold, else 1."""
    options: argparse.Namespace = make_parser().parse_args(arguments)
    claims = make_claims(options.steps)
    start = time.perf_counter()
    outcomes = run_all(claims, options.seeds, options.processes)
    seconds = time.perf_counter() - start
    failed = report(claims, outcomes, f"Accumulated gradient normalization, {options.steps} steps")
    save_picture(claims, outcomes, options.output)
    print(f"Saved the figure as {options.output}. The trainings took {seconds:.0f} s.")
    for claim in failed:
        print(f"This claim does not hold: {claim.text}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
