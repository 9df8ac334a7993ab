"""Reports of the examples: a table, the panels of a figure, and a last line."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
from command_line import Parser, on_devices
from digits import GOAL
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

import gradreduce as gr


@dataclass
class History:
    """The results of a training run.

    Attributes:
        losses: mean loss of each step, per worker or of all replicas.
        accuracies: pairs of a step and the test accuracy after it.
        weights: the final weights by name.
        seconds: duration of the training loop.
        per_step: launches, copies and bytes of one step of a worker, or of all together.
        num_pushes: number of pushes of AGN's workers.
        first_step: the number of the first one.
    """

    losses: dict[str, list[float]]
    accuracies: list[tuple[int, float]]
    weights: dict[str, np.ndarray]
    seconds: float
    per_step: dict[str, float]
    num_pushes: int = 0
    first_step: int = 1

    @property
    def accuracy(self) -> float:
        """The test accuracy at the end."""
        return self.accuracies[-1][1]

    @property
    def digest(self) -> str:
        """A hash of the final weights, 16 hexadecimal digits."""
        data = b"".join(value.tobytes() for value in self.weights.values())
        return hashlib.sha256(data).hexdigest()[:16]


def per_step(journal: Any, num_steps: int) -> dict[str, float]:
    """Returns launches, copies and bytes per step."""
    names = ("launches", "copies", "bytes")
    return {name: getattr(journal, name) / num_steps for name in names}


def where(mesh: gr.Mesh) -> str:
    """Describes the number of devices and their physical devices."""
    kind = "simulated" if mesh.backend == "sim" else "GPU"
    devices = f"{len(mesh)} on {kind} {', '.join(str(device.physical) for device in mesh.devices)}"
    if mesh.num_processes > 1:
        devices += f", in each of {mesh.num_processes} processes"
    return devices


def print_table(title: str, rows: dict[str, str]) -> None:
    """Prints the results as a table."""
    table = Table(title=title)
    table.add_column(overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    rich.print(table)


def draw_losses(panel: Axes, losses: Sequence[float], label: str, first_step: int = 1) -> None:
    """Draws the loss of each step."""
    steps = range(first_step, first_step + len(losses))
    panel.plot(steps, losses, label=label, linewidth=1, alpha=0.8)
    panel.set(title="Training loss", xlabel="step", ylabel="cross-entropy", yscale="log")


def draw_accuracies(panel: Axes, accuracies: Sequence[tuple[int, float]], label: str) -> None:
    """Draws the test accuracy over the steps."""
    panel.plot(*zip(*accuracies, strict=True), marker=".", label=label)
    panel.set(title="Test accuracy", xlabel="step", ylabel="accuracy")


def add_legends(losses: Axes, accuracies: Axes) -> None:
    """Draws the goal, and the legends of the panels of losses and accuracies."""
    accuracies.axhline(GOAL, color="gray", linestyle="--", linewidth=1, label=f"goal, {GOAL}")
    for panel in (losses, accuracies):
        panel.legend(fontsize="small")


def save_picture(history: History, path: Path) -> None:
    """Saves a figure of loss and test accuracy over the steps."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, losses in history.losses.items():
        draw_losses(left, losses, name, history.first_step)
    draw_accuracies(right, history.accuracies, "center" if history.num_pushes else "all replicas")
    add_legends(left, right)
    figure.savefig(path, dpi=120)


def conclude(accuracy: float, picture: Path) -> int:
    """Prints the last line; returns the exit status, 0 if the goal is reached."""
    print(f"Saved the figure as {picture}.")
    if accuracy >= GOAL:
        return 0
    print(f"The test accuracy {accuracy:.4f} is below {GOAL}.")
    return 1


def train_and_report(
    parser: Parser,
    options: argparse.Namespace,
    train: Callable[[gr.Mesh], History],
    title: str,
) -> int:
    """Trains on the mesh of the flags; returns the exit status.

    The first process prints the results and saves the figure; the others return 0.
    """

    def run(mesh: gr.Mesh) -> History | None:
        history = train(mesh)
        if mesh.process_index > 0:
            return None
        rows = {
            "devices": where(mesh),
            "test accuracy": f"{history.accuracy:.4f}",
            "steps/s": f"{len(history.losses['all replicas']) / history.seconds:.1f}",
            **{f"{name} per step": f"{count:.10g}" for name, count in history.per_step.items()},
            "digest of the weights": history.digest,
        }
        print_table(title, rows)
        return history

    history = on_devices(parser, options, run)
    if history is None:
        return 0
    save_picture(history, options.output)
    return conclude(history.accuracy, options.output)
