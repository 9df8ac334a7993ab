"""How the examples report a training: a table, the panels of a picture, a last line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich
from digits import GOAL
from matplotlib.axes import Axes
from rich.table import Table

import gradreduce as gr


def where(mesh: gr.Mesh) -> str:
    """How many devices, and on which physical ones."""
    kind = "simulated" if mesh.backend == "sim" else "GPU"
    return f"{len(mesh)} on {kind} {', '.join(str(device.physical) for device in mesh.devices)}"


def print_table(title: str, rows: dict[str, str]) -> None:
    """The closing table."""
    table = Table(title=title)
    table.add_column(overflow="fold")
    table.add_column("value", overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    rich.print(table)


def draw_losses(panel: Axes, losses: Sequence[float]) -> None:
    """The loss of each step."""
    panel.plot(range(1, len(losses) + 1), losses)
    panel.set(title="Training loss", xlabel="step", ylabel="cross-entropy", yscale="log")


def draw_accuracies(panel: Axes, accuracies: Sequence[tuple[int, float]]) -> None:
    """The test accuracy after some of the steps, and the goal."""
    panel.plot(*zip(*accuracies, strict=True), marker=".")
    panel.axhline(GOAL, color="gray", linestyle="--", linewidth=1)
    panel.set(title="Test accuracy", xlabel="step", ylabel="share recognised")


def conclude(accuracy: float, picture: Path) -> int:
    """The last line, and the exit status: 0 if the goal is reached, else 1."""
    print(f"The picture is in {picture}.")
    if accuracy >= GOAL:
        return 0
    print(f"The test accuracy is below {GOAL}.")
    return 1
