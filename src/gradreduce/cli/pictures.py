"""Pictures by Matplotlib, which is imported only here, and only for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Measured(Protocol):
    """A line of the tables of ``gradreduce bench``."""

    @property
    def benchmark(self) -> str:
        """Name of a line of the picture."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def busbw(self) -> float:
        """In GB/s."""


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, of inches; no window is opened.

    Raises:
        click.ClickException: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # takes long to import
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a picture needs {error.name}, which is not installed: pip install 'gradreduce[cli]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_bandwidths(path: Path, title: str, rows: Sequence[Measured]) -> None:
    """Writes a picture of bandwidth over size, a line for each benchmark."""
    figure = new_figure(7, 4.5)
    axes: Any = figure.add_subplot()
    for name in dict.fromkeys(row.benchmark for row in rows):
        lines = [(row.size, row.busbw) for row in rows if row.benchmark == name]
        axes.plot(*zip(*lines, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of an array")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)
