"""Trains a small network on handwritten digits, data-parallel, with gradreduce.

Read ``train`` first: it is all that a training script of your own needs from the library. The
network and its loss, in plain NumPy, are in ``digits.py``, the report in ``report.py``, the command
line (``python examples/train_digits.py --help``) in ``command_line.py``. Each device computes the
gradients of its own images, on a GPU by CuPy.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from command_line import Parser, file, in_range, on_devices, one_of, placement
from digits import Digits, accuracy, initial_weights, load, loss_and_gradients, read_weights
from matplotlib.figure import Figure
from report import conclude, draw_accuracies, draw_losses, print_table, where
from rich.progress import track

import gradreduce as gr

MICRO_BATCH_SIZE = 16  # images
# name -> an optimizer of a learning rate, and the rate that it takes here
OPTIMIZERS: dict[str, tuple[Callable[[float], gr.Optimizer], float]] = {
    "sgd": (gr.GradientDescentOptimizer, 0.5),
    "momentum": (lambda rate: gr.MomentumOptimizer(rate, 0.9), 0.1),
    "adam": (gr.AdamOptimizer, 0.005),
}
EVALUATE_EVERY = 10  # steps
AGGREGATION = {
    "add_n": gr.AggregationMethod.ADD_N,
    "tree": gr.AggregationMethod.EXPERIMENTAL_TREE,
    "accumulate_n": gr.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
}


# The training ----------------------------------------------------------------------------------


@dataclass
class History:
    """What a training run leaves behind.

    Attributes:
        losses: of each step, the mean over its images.
        accuracies: pairs of a step and the test accuracy after it.
        weights: the final ones, by name.
        seconds: of the whole loop.
        per_step: launches, copies and bytes of one step, on average.
    """

    losses: list[float]
    accuracies: list[tuple[int, float]]
    weights: dict[str, np.ndarray]
    seconds: float
    per_step: dict[str, float]

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end."""
        return self.accuracies[-1][1]

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any bit of the final weights."""
        data = b"".join(value.tobytes() for value in self.weights.values())
        return hashlib.sha256(data).hexdigest()[:16]


def train(mesh: gr.Mesh, digits: Digits, options: argparse.Namespace) -> History:
    """Trains on every device of ``mesh``; each makes several micro-batch gradients a step."""
    rng = np.random.default_rng(options.seed)
    variables = [
        gr.Variable(value, name, device=mesh)  # one copy on each device
        for name, value in initial_weights(rng).items()
    ]
    optimizer = make_optimizer(options)
    step = gr.SyncStep(
        variables,
        optimizer,
        gr.AllReduceCrossDeviceOps(options.all_reduce, num_packs=options.num_packs, mesh=mesh),
        aggregation_method=AGGREGATION[options.aggregation],
    )
    losses, accuracies = [], []
    shape = (len(mesh), options.micro_batches, MICRO_BATCH_SIZE)
    start = time.perf_counter()
    with mesh.journal() as journal:
        for number in track(range(1, options.steps + 1), "training"):
            picks = rng.integers(len(digits.train_images), size=shape)
            replicas = [
                replica_terms(i, optimizer, variables, digits, picks[i]) for i in range(len(mesh))
            ]
            # terms[replica][variable] is a list of micro-batch gradients. One call aggregates,
            # accumulates, packs, all-reduces and applies them.
            step([terms for _, terms in replicas])
            losses.append(float(np.mean([float(loss) for of, _ in replicas for loss in of])))
            if number % EVALUATE_EVERY == 0 or number == options.steps:
                accuracies.append((number, accuracy(read_weights(variables, 0), digits)))
    return History(
        losses,
        accuracies,
        {variable.name: variable.numpy() for variable in variables},
        time.perf_counter() - start,
        {
            "launches": journal.launches / options.steps,
            "copies": journal.copies / options.steps,
            "bytes": journal.bytes / options.steps,
        },
    )


def make_optimizer(options: argparse.Namespace) -> gr.Optimizer:
    """The one that was asked for, with its own learning rate unless another was."""
    make, usual_rate = OPTIMIZERS[options.optimizer]
    return make(usual_rate if options.learning_rate is None else options.learning_rate)


def replica_terms(
    replica: int,
    optimizer: gr.Optimizer,
    variables: Sequence[gr.Variable],
    digits: Digits,
    picks: np.ndarray,
) -> tuple[list[Any], list[list[Any]]]:
    """One replica's share of a step: its losses, and for each variable a list of gradients.

    The terms of a list are added up, so each is divided by their number. The mean over the
    replicas is the library's business.

    Args:
        replica: which one.
        optimizer: computes the gradients.
        variables: the weights.
        digits: the data.
        picks: numbers of training images, a row for each micro-batch.
    """
    losses, rows = [], []
    with gr.replica(replica):  # whose copy of the weights is read
        for pick in picks:
            batch = digits.train_images[pick], digits.train_labels[pick]
            loss, gradients = loss_and_gradients(optimizer, variables, *batch, share=1 / len(picks))
            losses.append(loss)
            rows.append(gradients)
    return losses, [list(terms) for terms in zip(*rows, strict=True)]


# The report ------------------------------------------------------------------------------------


def table_rows(mesh: gr.Mesh, history: History, options: argparse.Namespace) -> dict[str, str]:
    """What the closing table says."""
    return {
        "devices": where(mesh),
        "aggregation": options.aggregation,
        "all-reduce": f"{options.all_reduce}, num_packs {options.num_packs}",
        "test accuracy": f"{history.accuracy:.4f}",
        "steps/s": f"{options.steps / history.seconds:.1f}",
        **{f"{name} per step": f"{count:.10g}" for name, count in history.per_step.items()},
        "digest of the weights": history.digest,
    }


def save_picture(history: History, path: Path) -> None:
    """Loss and test accuracy over the steps."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_losses(left, history.losses)
    draw_accuracies(right, history.accuracies)
    figure.savefig(path, dpi=120)


# The command line ------------------------------------------------------------------------------


def make_parser() -> Parser:
    """All the flags."""
    parser = Parser(__doc__)
    flag = parser.flag
    flag("--devices", 4, in_range(int, 1, 64), "1 to 64", "how many devices share the work")
    flag("--backend", "auto", *one_of("auto", "sim", "cuda"), "GPUs or simulated devices")
    flag("--placement", None, placement, "a number from 0 to 63 for each device, as 0,0,1,1",
         "the physical device of each device")  # fmt: skip
    flag("--kernels", "numpy", *one_of("numpy", "compiled"), "what simulated devices run")
    flag("--micro-batches", 4, in_range(int, 1, 64), "1 to 64", "gradients of a device in a step")
    flag("--aggregation", "add_n", *one_of(*AGGREGATION), "how they are added up")
    flag("--all-reduce", "hierarchical_copy", *one_of("hierarchical_copy", "nccl"),
         "how devices add theirs")  # fmt: skip
    flag("--num-packs", 1, in_range(int, 0, 1000), "0 to 1000", "packs of an all-reduce")
    flag("--steps", 500, in_range(int, 1, 10_000), "1 to 10000", "how long to train")
    flag("--optimizer", "momentum", *one_of(*OPTIMIZERS), "how gradients change the weights")
    usual = ", ".join(f"{rate} of {name}" for name, (_, rate) in OPTIMIZERS.items())
    flag("--learning-rate", None, in_range(float, 1e-6, 10), "1e-6 to 10",
         f"of the optimizer; without one {usual}")  # fmt: skip
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "same seed, same weights")
    flag("--output", "digits.png", file(".png"), "a .png file in a folder that exists",
         "where the picture goes")  # fmt: skip
    flag("--save-weights", None, file(".npz"), "a .npz file in a folder that exists",
         "where the final weights go")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; 0 if the goal is reached, else 1. A bad flag exits with 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    def run(mesh: gr.Mesh) -> History:
        history = train(mesh, load(), options)
        title = f"{options.steps} steps on handwritten digits"
        print_table(title, table_rows(mesh, history, options))
        return history

    history = on_devices(parser, options, run)
    save_picture(history, options.output)
    if options.save_weights is not None:
        np.savez(options.save_weights, **history.weights)
    return conclude(history.accuracy, options.output)


if __name__ == "__main__":
    sys.exit(main())
