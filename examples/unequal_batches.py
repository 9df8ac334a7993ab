"""Trains with micro-batches of unequal size: the mean of their means, and the weighted mean.

The model predicts the next symbol of generated sequences. Long sequences follow other rules than
short ones, and a micro-batch contains sequences of about the same length, as in training on text.
The mean of the micro-batches' mean gradients then counts a symbol of a short sequence more than one
of a long sequence. With ``weights=`` each symbol counts once, and the step is that of one large
batch. The program trains all three ways and compares the losses. ``train`` is the part to copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
from command_line import Parser, file, in_range, on_devices
from matplotlib.figure import Figure
from report import draw_losses, where
from rich.progress import track
from rich.table import Table

import gradreduce as gr

NUM_SYMBOLS = 12
SEQUENCES = 8  # of a micro-batch
MICRO_BATCHES = 2  # of a replica in a step
LEARNING_RATE = 10.0
TOLERANCE = 1e-5  # between losses that are equal up to rounding
ONE_BATCH, WEIGHTED, MEAN_OF_MEANS = "one batch", "weights=", "mean of means"


@dataclass
class Result:
    """The results of a training.

    Attributes:
        losses: the loss on held-out sequences after each step.
        first_gradient: the gradient of the first step.
    """

    losses: list[float]
    first_gradient: np.ndarray


# The data --------------------------------------------------------------------------------------


class Sequences:
    """Generates sequences of 2 to 120 symbols, of which the long ones follow other rules."""

    def __init__(self, rng: np.random.Generator) -> None:
        scores = np.exp(3 * rng.standard_normal((2, NUM_SYMBOLS, NUM_SYMBOLS)))
        # For short and long sequences: the probability of each next symbol and those before it.
        self._rules = np.cumsum(scores / scores.sum(axis=-1, keepdims=True), axis=-1)

    def draw(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """Returns how often each symbol follows each other one, in micro-batches by length."""
        lengths = np.sort(np.exp(rng.uniform(np.log(2), np.log(120), number * SEQUENCES)))
        micro_batches = np.arange(len(lengths)) // SEQUENCES
        symbols = rng.integers(NUM_SYMBOLS, size=len(lengths))
        counts = np.zeros((number, NUM_SYMBOLS, NUM_SYMBOLS), np.float32)
        for position in range(int(lengths[-1])):
            rules = self._rules[(lengths > 20).astype(int), symbols]
            following = np.sum(rng.random((len(lengths), 1)) > rules[:, :-1], axis=1)
            longer = lengths >= position + 1
            np.add.at(counts, (micro_batches[longer], symbols[longer], following[longer]), 1)
            symbols = following
        return counts[rng.permutation(number)]


# The model -------------------------------------------------------------------------------------


def mean_loss(scores: Any, counts: Any) -> Any:
    """Computes the cross-entropy of the next symbol, its mean over all symbols."""
    counts = np.asarray(counts, like=scores)  # on the device of the scores
    log_sums = np.log(np.sum(np.exp(scores), axis=1, keepdims=True))
    return np.sum(counts * (log_sums - scores)) / np.sum(counts)


# The training ----------------------------------------------------------------------------------


def train(mesh: gr.Mesh, options: argparse.Namespace, way: str) -> Result:
    """Trains on every device of ``mesh``; every process calls it.

    All processes draw the same sequences, and each uses those of its own replicas.
    """
    rng = np.random.default_rng(options.seed)
    sequences = Sequences(rng)
    held_out = sequences.draw(rng, 50).sum(axis=0)
    scores = gr.Variable(np.zeros((NUM_SYMBOLS, NUM_SYMBOLS), np.float32), "scores", device=mesh)
    optimizer = gr.GradientDescentOptimizer(LEARNING_RATE)
    ops = gr.AllReduceCrossDeviceOps("hierarchical_copy", mesh=mesh)
    step = gr.SyncStep([scores], optimizer, ops)
    first = mesh.process_index * len(mesh)  # the number of this process's first replica
    losses, values = [], [scores.numpy()]
    for _ in track(range(options.steps), way, disable=mesh.process_index > 0):
        batches = sequences.draw(rng, mesh.num_replicas * MICRO_BATCHES)
        of_replicas = batches.reshape(mesh.num_replicas, MICRO_BATCHES, *batches.shape[1:])[first:]
        if way == ONE_BATCH:  # on each replica
            of_replicas = np.stack([batches.sum(axis=0, keepdims=True)] * len(mesh))
        terms, weights = [], []
        for replica in range(len(mesh)):
            with gr.replica(replica):  # reads this replica's copy of the scores
                gradients = [gradient_of(optimizer, scores, each) for each in of_replicas[replica]]
            terms.append([gradients])  # terms[replica][variable] is a list
            weights.append([int(each.sum()) for each in of_replicas[replica]])
        if way == WEIGHTED:
            step(terms, weights=weights)  # the mean over all symbols of all micro-batches
        else:  # SyncStep sums the terms of a list
            step([[[each / len(of_one) for each in of_one]] for [of_one] in terms])
        values.append(scores.numpy())
        losses.append(float(mean_loss(values[-1], held_out)))
    return Result(losses, (values[0] - values[1]) / np.float32(LEARNING_RATE))


def gradient_of(optimizer: gr.Optimizer, scores: gr.Variable, counts: np.ndarray) -> Any:
    """Computes the gradient of the mean loss of some sequences."""
    [(gradient, _)] = optimizer.compute_gradients(lambda: mean_loss(scores, counts), [scores])
    return gradient


# The report ------------------------------------------------------------------------------------


def distance(result: Result, reference: Result) -> float:
    """Returns the size of the difference between first gradients, relative to the reference."""
    difference = result.first_gradient - reference.first_gradient
    return float(np.linalg.norm(difference) / np.linalg.norm(reference.first_gradient))


def print_results(title: str, results: dict[str, Result]) -> None:
    """Prints the trainings beside each other."""
    table = Table("", *results, title=title)
    reference = results[ONE_BATCH]
    distances = [f"{distance(each, reference):.1e}" for each in results.values()]
    table.add_row("error of the first gradient", *distances)
    last = [f"{each.losses[-1]:.4f}" for each in results.values()]
    table.add_row("loss on held-out sequences", *last)
    rich.print(table)


def save_picture(results: dict[str, Result], path: Path) -> None:
    """Saves a figure of the losses over the steps."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    panel = figure.subplots()
    for name, result in results.items():
        draw_losses(panel, result.losses, name)
    panel.lines[0].set_linewidth(4)  # the weighted one lies on it
    panel.lines[0].set_alpha(0.3)
    panel.set(title="Loss on held-out sequences", yscale="linear")
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    print(f"Saved the figure as {path}.")


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Returns the parser of the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    parser.add_device_flags()
    flag("--steps", 60, in_range(int, 1, 10_000), "1 to 10000", "steps of each training")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "random seed")
    flag("--output", "unequal_batches.png", file(".png"), "a .png file in a folder that exists",
         "file for the figure")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trainings; returns 0 if the weighted one equals that of one batch, else 1."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    def run(mesh: gr.Mesh) -> dict[str, Result] | None:
        ways = (ONE_BATCH, WEIGHTED, MEAN_OF_MEANS)
        results = {way: train(mesh, options, way) for way in ways}
        if mesh.process_index > 0:  # the first one reports
            return None
        print_results(f"{options.steps} steps; devices: {where(mesh)}", results)
        return results

    results = on_devices(parser, options, run)
    if results is None:
        return 0
    save_picture(results, options.output)
    one, weighted, _ = [result.losses[-1] for result in results.values()]
    if abs(weighted - one) <= TOLERANCE:
        print("The weighted training is that of one batch, up to rounding.")
        return 0
    print(f"The losses of one batch and of weights= differ by {abs(weighted - one):.2g}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
