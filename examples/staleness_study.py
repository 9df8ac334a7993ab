"""Compares AGN and the rules of a center when pushes are old, by loss, steps and bytes.

Each training is simulated in one thread by ``gr.simulate_center``, with the center and the rules of
the library: n + 1 workers of equal speed do not wait for each other, so each push has age n, but
for the first push of each worker (0 to n). All trainings make the same number of local steps.

AGN pushes mean gradients; the rules get deltas, as in the papers on local SGD and DiLoCo. The
hyperparameters of a method are the same for every staleness: ``--grid`` chooses them at staleness
0. ``staleness_runs.py`` has the trainings, ``staleness_models.py`` the models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich
from command_line import Parser, file, in_range, one_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from process_pool import outcomes_of
from rich.progress import track
from rich.table import Table
from scipy.stats import t as student_t
from staleness_models import load
from staleness_runs import METHODS, SYNCHRONOUS, Case, Outcome, Settings, run

STALENESS = 0, 2, 8, 32
STEP_UNIT = 990  # a multiple of the period times each number of workers
ALL_METHODS = *METHODS, SYNCHRONOUS

# Hyperparameters ---------------------------------------------------------------------------------

# At staleness 0 a method and the one whose hyperparameters it uses compute the same bits.
SAME_AS = {"StalenessScaled": "Mean", "DelayedNesterov": "Nesterov"}
GRID: dict[str, list[Settings]] = {
    "AGN": [Settings(rate) for rate in (0.1, 0.3, 1.0, 3.0, 10.0)],
    "Mean": [Settings(*each) for each in itertools.product((0.1, 0.3, 1.0), (0.3, 0.7, 1.0))],
    "Nesterov": [
        Settings(*each) for each in itertools.product((0.03, 0.1, 0.3), (0.3, 0.7), (0.5, 0.9))
    ],
    SYNCHRONOUS: [Settings(rate) for rate in (0.1, 0.3, 1.0, 3.0)],
}
CHOSEN: dict[str, dict[str, Settings]] = {
    "digits": {
        "AGN": Settings(1.0),
        "Mean": Settings(1.0, 0.3),
        "Nesterov": Settings(0.03, 0.7, 0.9),
        SYNCHRONOUS: Settings(1.0),
    },
    "characters": {  # with --steps 990
        "AGN": Settings(3.0),
        "Mean": Settings(1.0, 0.7),
        "Nesterov": Settings(0.1, 0.7, 0.9),
        SYNCHRONOUS: Settings(0.3),
    },
}
NUM_GRID_SEEDS = 3  # other seeds than those of the study


def settings_of(model: str, method: str) -> Settings:
    """Returns the hyperparameters of a method of the study."""
    return CHOSEN[model][SAME_AS.get(method, method)]


def run_grid(options: argparse.Namespace) -> int:
    """Prints the mean loss of each point of the grid; returns 1 if others than ours are best."""
    cases = {
        method: [
            Case(options.model, method, 1, options.steps, settings, NUM_GRID_SEEDS, for_grid=True)
            for settings in points
        ]
        for method, points in GRID.items()
    }
    found = run_all([case for row in cases.values() for case in row], options.processes)
    table = Table("method", *Settings._fields, "loss", "", title="Held-out loss at staleness 0")
    wrong = []
    for method, row in cases.items():
        losses = {case.settings: np.mean(found[case].losses[-1]) for case in row}
        best = min(losses, key=losses.__getitem__)
        for settings, loss in losses.items():
            mark = "best" if settings == best else ""
            table.add_row(method, *texts(settings), f"{loss:.4f}", mark)
        if best != CHOSEN[options.model][method]:
            wrong.append(f"For {method} {best} is better than what the study uses.")
    rich.print(table)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


# The trainings -----------------------------------------------------------------------------------

Found = dict[tuple[str, int], Outcome]  # of a method and a staleness


def run_all(cases: Sequence[Case], num_processes: int) -> dict[Case, Outcome]:
    """Runs all cases with a progress bar."""
    found = outcomes_of(run, cases, num_processes)
    return dict(track(found, "training", total=len(cases)))


def run_study(options: argparse.Namespace) -> Found:
    """Runs each method with each staleness."""
    cases = {
        (method, staleness): Case(
            options.model, method, staleness + 1, options.steps,
            settings_of(options.model, method), options.seeds,
        )
        for staleness in options.staleness
        for method in ALL_METHODS
    }  # fmt: skip
    outcomes = run_all(list(cases.values()), options.processes)
    return {key: outcomes[case] for key, case in cases.items()}


# The report --------------------------------------------------------------------------------------


def summary(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean losses of all seeds and half of their 95 % intervals, by Student's t."""
    losses = np.array(outcome.losses)
    num_seeds = losses.shape[1]
    with np.errstate(all="ignore"):  # of infinite losses
        errors = losses.std(axis=1, ddof=1) / math.sqrt(num_seeds)
    return losses.mean(axis=1), errors * student_t.ppf(0.975, num_seeds - 1)


def cell(outcome: Outcome, guess: float) -> str:
    """Returns the final loss with its interval, or how many trainings diverged."""
    final = outcome.losses[-1]
    num_diverged = sum(loss > guess for loss in final)
    if num_diverged:
        return f"{num_diverged} of {len(final)} diverged"
    mean, half = summary(outcome)
    return f"{mean[-1]:.3f} ± {half[-1]:.3f}"


def report(found: Found, options: argparse.Namespace) -> None:
    """Prints the final losses, and with which hyperparameters they were computed."""
    guess = load(options.model).guess
    settings = Table("method", "push", *Settings._fields, title="Chosen by --grid at staleness 0")
    losses = Table("method", *(f"staleness {each}" for each in options.staleness),
                   title=f"Held-out loss after {options.steps} steps of all workers")  # fmt: skip
    for method in ALL_METHODS:
        push = METHODS[method].push if method in METHODS else "each gradient"
        settings.add_row(method, push, *texts(settings_of(options.model, method)))
        cells = [cell(found[method, staleness], guess) for staleness in options.staleness]
        losses.add_row(method, *cells)
    rich.print(settings, losses)
    print(f"± is half of the 95 % interval by Student's t, of {options.seeds} seeds. A training "
          f"has diverged if its loss is above {guess:.2f}, that of a guess.")  # fmt: skip


def texts(settings: Settings) -> list[str]:
    return ["" if each is None else f"{each:g}" for each in settings]


def numbers_of(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the JSON file has: all losses, those that are not finite as null."""

    def finite(values: np.ndarray) -> Any:
        return json.loads(json.dumps(values.tolist()), parse_constant=lambda name: None)

    trainings = []
    for (method, staleness), outcome in found.items():
        mean, half = summary(outcome)
        trainings.append({
            "method": method, "staleness": staleness,
            "settings": settings_of(options.model, method)._asdict(),
            "steps": outcome.steps, "bytes": outcome.num_bytes,
            "losses": finite(np.array(outcome.losses)),
            "mean": finite(mean), "half_interval": finite(half),
        })  # fmt: skip
    return {"model": options.model, "seeds": options.seeds, "trainings": trainings}


def save_picture(found: Found, guess: float, path: Path) -> None:
    """Saves a figure: a column for each staleness, losses by steps above those by bytes.

    Args:
        found: the trainings.
        guess: the loss of a guess; means above it are outside of the picture.
        path: a .png file.
    """
    columns = sorted({staleness for _, staleness in found})
    figure = Figure(figsize=(1 + 3 * len(columns), 6), layout="constrained")
    panels = figure.subplots(2, len(columns), sharey=True, squeeze=False)
    for (method, staleness), outcome in found.items():
        above, below = panels[:, columns.index(staleness)]
        draw(above, outcome.steps, outcome, method, guess)
        draw(below, np.array(outcome.num_bytes) / 1e6, outcome, method, guess)
        above.set(title=f"staleness {staleness}", xlabel="steps of all workers")
        below.set(xlabel="megabytes", xscale="log")
    low = min(np.min(outcome.losses) for outcome in found.values())
    panels[0, 0].set(yscale="log", ylim=(0.9 * low, guess))
    for panel in panels[:, 0]:
        panel.set(ylabel="held-out loss")
    panels[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=80)


def draw(panel: Axes, x: Sequence[float], outcome: Outcome, method: str, guess: float) -> None:
    """Draws the mean of the seeds and its 95 % interval, without the first point, a guess."""
    mean, half = summary(outcome)
    x, mean, half = x[1:], np.where(mean[1:] < guess, mean[1:], np.nan), half[1:]
    color = f"C{ALL_METHODS.index(method)}"
    style = "--" if method == SYNCHRONOUS else "-"
    panel.plot(x, mean, style, color=color, label=method)
    panel.fill_between(x, mean - half, mean + half, color=color, alpha=0.2)
    panel.grid(visible=True, alpha=0.3)


# The command line --------------------------------------------------------------------------------


def staleness_list(text: str) -> list[int]:
    """Parses different numbers of ``STALENESS``."""
    found = [int(part) for part in text.split(",")]
    if len({*found}) < len(found) or not {*found} <= {*STALENESS}:
        raise ValueError
    return found


def multiple(text: str) -> int:
    """Parses a number of steps."""
    steps = in_range(int, STEP_UNIT, 100 * STEP_UNIT)(text)
    if steps % STEP_UNIT:
        raise ValueError
    return steps


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--model", "digits", *one_of("digits", "characters"), "the second needs PyTorch")
    flag("--steps", 4 * STEP_UNIT, multiple, f"multiples of {STEP_UNIT} up to {100 * STEP_UNIT}",
         "local steps of all workers of a training")  # fmt: skip
    flag("--seeds", 10, in_range(int, 2, 100), "2 to 100", "repetitions of a training")
    flag("--staleness", [*STALENESS], staleness_list, "some of 0,2,8,32", "ages of pushes")
    flag("--processes", 2, in_range(int, 1, 64), "1 to 64", "number of processes")
    picture = Path("staleness_study.png")
    flag("--output", picture, file(".png"), "a .png file in a folder that exists",
         "file for the figure; the numbers are saved beside it, as .json")  # fmt: skip
    parser.add_argument("--grid", action="store_true", help="choose the hyperparameters")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, or with ``--grid`` 1 if other hyperparameters are better."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        load(options.model)
    except ModuleNotFoundError as error:
        parser.error(f"argument --model: {error}")
    if options.grid:
        return run_grid(options)
    start = time.perf_counter()
    found = run_study(options)
    seconds = time.perf_counter() - start
    report(found, options)
    numbers = options.output.with_suffix(".json")
    numbers.write_text(json.dumps(numbers_of(found, options)), "utf-8")
    save_picture(found, load(options.model).guess, options.output)
    print(f"Saved {options.output} and {numbers}. The trainings took {seconds:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
