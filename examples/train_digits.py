"""Trains a small network on handwritten digits, data-parallel, with gradreduce.

Read ``train`` first: it is all that a training script of your own needs from the library. The
rest is the network with a backward pass written by hand, the report, and the command line
(``python examples/train_digits.py --help``). NumPy computes the gradients in host memory; from
there on they are the devices' business.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import rich
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import gradreduce as gr

NUM_HIDDEN = 64
MICRO_BATCH_SIZE = 16  # images
MOMENTUM = 0.9
GOAL = 0.95  # test accuracy
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
    step = gr.SyncStep(
        variables,
        gr.MomentumOptimizer(options.learning_rate, MOMENTUM),
        gr.AllReduceCrossDeviceOps(options.all_reduce, num_packs=options.num_packs, mesh=mesh),
        aggregation_method=AGGREGATION[options.aggregation],
    )
    losses, accuracies = [], []
    shape = (len(mesh), options.micro_batches, MICRO_BATCH_SIZE)
    start = time.perf_counter()
    with mesh.journal() as journal:
        for number in track(range(1, options.steps + 1), "training"):
            picks = rng.integers(len(digits.train_images), size=shape)
            replicas = [replica_terms(i, variables, digits, picks[i]) for i in range(len(mesh))]
            # terms[replica][variable] is a list of micro-batch gradients. One call aggregates,
            # accumulates, packs, all-reduces and applies them.
            step([terms for _, terms in replicas])
            losses.append(float(np.mean([loss for loss, _ in replicas])))
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


def read_weights(variables: Sequence[gr.Variable], replica: int) -> list[np.ndarray]:
    """One replica's own copy of the variables, as NumPy arrays."""
    with gr.replica(replica):
        return [variable.numpy() for variable in variables]


def replica_terms(
    replica: int, variables: Sequence[gr.Variable], digits: Digits, picks: np.ndarray
) -> tuple[float, list[list[np.ndarray]]]:
    """One replica's share of a step: its loss, and for each variable a list of gradients.

    The terms of a list are added up, so each is divided by their number. The mean over the
    replicas is the library's business.

    Args:
        replica: which one.
        variables: to read the weights from.
        digits: the data.
        picks: numbers of training images, a row for each micro-batch.
    """
    weights = read_weights(variables, replica)
    losses, rows = [], []
    for pick in picks:
        loss, gradients = backward(weights, digits.train_images[pick], digits.train_labels[pick])
        losses.append(loss)
        rows.append([gradient / len(picks) for gradient in gradients])
    return float(np.mean(losses)), [list(terms) for terms in zip(*rows, strict=True)]


# The network -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """Pictures of 8 by 8 pixels, flat, from 0 to 1, and the digits that they show."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Digits:
    """The data set that comes with scikit-learn; a fifth, always the same, is for the test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels, test_images, test_labels)


def initial_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two dense layers: 64 pixels, ``NUM_HIDDEN`` units, 10 digits."""

    def dense(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    return {
        "hidden/kernel": dense(64, NUM_HIDDEN),
        "hidden/bias": np.zeros(NUM_HIDDEN, np.float32),
        "output/kernel": dense(NUM_HIDDEN, 10),
        "output/bias": np.zeros(10, np.float32),
    }


def forward(weights: Sequence[np.ndarray], images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden activations and the log-probabilities of the ten digits."""
    hidden_kernel, hidden_bias, output_kernel, output_bias = weights
    hidden = np.tanh(images @ hidden_kernel + hidden_bias)
    logits = hidden @ output_kernel + output_bias
    logits -= logits.max(axis=1, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def backward(
    weights: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """The mean cross-entropy of a micro-batch, and its gradient by each of the weights."""
    hidden, log_probabilities = forward(weights, images)
    rows = np.arange(len(labels))
    by_logits = np.exp(log_probabilities)
    by_logits[rows, labels] -= 1
    by_logits /= len(labels)
    by_sums = by_logits @ weights[2].T * (1 - hidden * hidden)
    return float(-log_probabilities[rows, labels].mean()), [
        images.T @ by_sums,
        by_sums.sum(axis=0),
        hidden.T @ by_logits,
        by_logits.sum(axis=0),
    ]


def accuracy(weights: Sequence[np.ndarray], digits: Digits) -> float:
    """The share of test images that are recognised."""
    _, log_probabilities = forward(weights, digits.test_images)
    return float((log_probabilities.argmax(axis=1) == digits.test_labels).mean())


# The report ------------------------------------------------------------------------------------


def print_table(mesh: gr.Mesh, history: History, options: argparse.Namespace) -> None:
    """The closing table."""
    placement = ", ".join(str(device.physical) for device in mesh.devices)
    kind = "simulated" if mesh.backend == "sim" else "GPU"
    rows = {
        "devices": f"{len(mesh)} on {kind} {placement}",
        "aggregation": options.aggregation,
        "all-reduce": f"{options.all_reduce}, num_packs {options.num_packs}",
        "test accuracy": f"{history.accuracy:.4f}",
        "steps/s": f"{options.steps / history.seconds:.1f}",
        **{f"{name} per step": f"{count:.10g}" for name, count in history.per_step.items()},
        "digest of the weights": history.digest,
    }
    table = Table(title=f"{options.steps} steps on handwritten digits")
    table.add_column(overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    rich.print(table)


def save_picture(history: History, path: Path) -> None:
    """Loss and test accuracy over the steps."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(history.losses) + 1), history.losses)
    left.set(title="Training loss", xlabel="step", ylabel="cross-entropy", yscale="log")
    right.plot(*zip(*history.accuracies, strict=True), marker=".")
    right.axhline(GOAL, color="gray", linestyle="--", linewidth=1)
    right.set(title="Test accuracy", xlabel="step", ylabel="share recognised")
    figure.savefig(path, dpi=120)


# The command line ------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Answers a bad flag with one line: the flag, what came, and the allowed values."""

    def __init__(self) -> None:
        super().__init__(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
        self.allowed: dict[str, str] = {}

    def flag(
        self, name: str, default: Any, read: Callable[[str], Any], allowed: str, meaning: str
    ) -> None:
        """Adds a flag whose text ``read`` turns into a value, or raises ``ValueError``."""

        def checked(text: str) -> Any:
            try:
                return read(text)
            except (ValueError, OSError):
                raise argparse.ArgumentTypeError(f"got {text!r}") from None

        shown = "none" if default is None else default
        text = f"{meaning} (allowed: {allowed}; default: {shown})"
        self.add_argument(name, default=default, type=checked, metavar="VALUE", help=text)
        self.allowed[name] = allowed

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2; every fault that argparse finds comes here too."""
        found = re.match(r"argument (--[a-z-]+): ", message)
        if found and found[1] in self.allowed:
            message = f"{message.removeprefix('argument ')}; allowed: {self.allowed[found[1]]}"
        elif message.startswith("unrecognized"):
            message += f"; allowed: {', '.join(['--help', *self.allowed])}"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def in_range(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """Reads a number from ``low`` to ``high``."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def one_of(*names: str) -> tuple[Callable[[str], str], str]:
    """Reads one of ``names``; and says which they are."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return read, ", ".join(names)


def file(suffix: str) -> Callable[[str], Path]:
    """Reads the path of a file that can be written."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix or path.is_dir() or not path.parent.is_dir():
            raise ValueError
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError
        return path

    return read


def placement(text: str) -> list[int]:
    """Reads the physical device of each logical one."""
    return [in_range(int, 0, 63)(part) for part in text.split(",")]


def make_parser() -> Parser:
    """All the flags."""
    parser = Parser()
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
    flag("--learning-rate", 0.1, in_range(float, 1e-6, 10), "1e-6 to 10", "of the momentum rule")
    flag("--seed", 0, in_range(int, 0, 2**32 - 1), "0 to 4294967295", "same seed, same weights")
    flag("--output", "digits.png", file(".png"), "a .png file in a folder that exists",
         "where the picture goes")  # fmt: skip
    flag("--save-weights", None, file(".npz"), "a .npz file in a folder that exists",
         "where the final weights go")  # fmt: skip
    return parser


def open_devices(options: argparse.Namespace) -> gr.Mesh:
    """The mesh that the flags ask for; on GPUs, however few, the devices are spread evenly."""
    backend = None if options.backend == "auto" else options.backend
    devices: int | list[int] = options.placement or options.devices
    if options.placement is None and backend != "sim":
        with gr.open_mesh(backend=backend) as seen:
            backend, num_gpus = seen.backend, len(seen)
        if backend == "cuda":
            devices = [i * num_gpus // options.devices for i in range(options.devices)]
    return gr.open_mesh(devices, backend=backend, kernels=options.kernels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; 0 if the goal is reached, else 1. A bad flag exits with 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.placement is not None and len(options.placement) != options.devices:
        parser.error(f"argument --placement: got {len(options.placement)} numbers for "
                     f"{options.devices} devices")  # fmt: skip
    try:
        mesh = open_devices(options)
    except (gr.errors.BackendUnavailableError, ValueError) as error:
        parser.error(f"argument --backend: {error}")
    with mesh:
        try:
            history = train(mesh, load(), options)
        except gr.errors.BackendUnavailableError as error:  # no compiler for the kernels
            flag = "--kernels" if mesh.backend == "sim" else "--backend"
            parser.error(f"argument {flag}: {error}")
        print_table(mesh, history, options)
    save_picture(history, options.output)
    if options.save_weights is not None:
        np.savez(options.save_weights, **history.weights)
    reached = history.accuracy >= GOAL
    print(f"The picture is in {options.output}.")
    if not reached:
        print(f"The test accuracy is below {GOAL}.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
