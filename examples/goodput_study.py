"""Shows how much work rounds keep if workers crash, by quorum and grace.

``gr.simulate_center`` runs 40 workers that crash and lose messages, in virtual time. The goodput
is the number of local steps in pushes that the center has applied, over that of rounds of all
workers without faults. A round of all workers waits for each crash; a smaller quorum does not, and
grace lets slower workers join the round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rich
from command_line import Parser, file, in_range
from matplotlib.figure import Figure
from process_pool import outcomes_of
from rich.progress import track
from rich.table import Table

import gradreduce as gr

NUM_WORKERS, PERIOD = 40, 10
SECONDS = 400.0  # virtual; a period of the fastest worker takes 10
NO_FAULTS = gr.CenterFaults(slowest=1.1)
FAULTS = gr.CenterFaults(slowest=1.1, crashes=0.02, restart_seconds=30.0, lost=0.01)
QUORUMS = 10, 20, 30, 36, NUM_WORKERS
GRACES = 0.0, 1.0, 2.0, 5.0  # virtual seconds


class Case(NamedTuple):
    """A simulation; ``num_required=None`` applies each push when it arrives."""

    num_required: int | None
    grace: float
    faults: gr.CenterFaults
    seed: int


def num_steps(case: Case) -> int:
    """Returns the local steps in the pushes that the center has applied."""
    return gr.simulate_center(
        {"w": np.zeros(1, "float32")}, lambda values, worker, random: {"w": np.ones(1, "float32")},
        num_workers=NUM_WORKERS, seconds=SECONDS, period=PERIOD,
        center_rule=gr.center_rules.Mean(0.1), num_required=case.num_required, grace=case.grace,
        faults=case.faults, seed=case.seed,
    ).num_steps  # fmt: skip


def run_all(num_seeds: int, num_processes: int) -> dict[tuple[int | None, float], list[float]]:
    """Returns the goodput for each quorum and grace, one of each seed."""
    seeds = range(num_seeds)
    # All workers are the largest quorum, so that grace changes nothing.
    cells = [
        (None, 0.0), *itertools.product(QUORUMS[:-1], GRACES), (NUM_WORKERS, 0.0)
    ]  # fmt: skip
    whole = [Case(NUM_WORKERS, 0.0, NO_FAULTS, seed) for seed in seeds]
    cases = [*whole, *(Case(*cell, FAULTS, seed) for cell in cells for seed in seeds)]
    steps = dict(track(outcomes_of(num_steps, cases, num_processes), "running", len(cases)))
    return {
        cell: [steps[Case(*cell, FAULTS, seed)] / steps[whole[seed]] for seed in seeds]
        for cell in cells
    }


# The report --------------------------------------------------------------------------------------

Goodput = dict[tuple[int | None, float], list[float]]


def report(found: Goodput) -> None:
    """Prints the mean goodput of the seeds."""
    table = Table("quorum", *(f"grace {grace:g} s" for grace in GRACES), title="Goodput")
    for quorum in QUORUMS[:-1]:
        cells = [f"{np.mean(found[quorum, grace]):.2f}" for grace in GRACES]
        table.add_row(f"{quorum} of {NUM_WORKERS}", *cells)
    table.add_row(f"{NUM_WORKERS} of {NUM_WORKERS}", f"{np.mean(found[NUM_WORKERS, 0.0]):.2f}")
    table.add_row("no rounds", f"{np.mean(found[None, 0.0]):.2f}")
    rich.print(table)


def save_picture(found: Goodput, path: Path) -> None:
    """Saves a figure of the goodput over quorum, a line for each grace."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for grace in GRACES:
        shown = [found.get((quorum, grace), found[NUM_WORKERS, 0.0]) for quorum in QUORUMS]
        means = np.mean(shown, axis=1)
        (line,) = panel.plot(QUORUMS, means, marker=".", label=f"grace {grace:g} s")
        panel.fill_between(QUORUMS, np.min(shown, axis=1), np.max(shown, axis=1),
                           color=line.get_color(), alpha=0.2)  # fmt: skip
    panel.axhline(np.mean(found[None, 0.0]), color="gray", linestyle="--", label="no rounds")
    panel.set(
        xlabel=f"pushes of a round, of {NUM_WORKERS} workers", ylabel="goodput", ylim=(0, 1.1)
    )
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=80)


# The command line --------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--seeds", 3, in_range(int, 1, 100), "1 to 100", "number of runs of each cell")
    flag("--processes", 2, in_range(int, 1, 64), "1 to 64", "number of processes")
    flag("--output", Path("goodput_study.png"), file(".png"), "a .png file in a folder that exists",
         "file for the figure; the numbers are saved beside it, as .json")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0."""
    options: argparse.Namespace = make_parser().parse_args(arguments)
    found = run_all(options.seeds, options.processes)
    report(found)
    numbers = options.output.with_suffix(".json")
    numbers.write_text(json.dumps([
        {"quorum": quorum, "grace": grace, "goodput": each}
        for (quorum, grace), each in found.items()
    ]), "utf-8")  # fmt: skip
    save_picture(found, options.output)
    print(f"Saved {options.output} and {numbers}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
