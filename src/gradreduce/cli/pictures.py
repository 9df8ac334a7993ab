"""Pictures by Matplotlib, which is imported only to draw one."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradreduce.device import replace_file
from gradreduce.errors import install_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of this size in inches; opens no window.

    Raises:
        click.ClickException: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # slow to import
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a picture needs {error.name}, which is not installed: {install_hint('cli')}"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, completely or not at all.

    Raises:
        click.ClickException: the file cannot be written.
    """
    try:
        figure.savefig(content := io.BytesIO(), format=path.suffix[1:])
        replace_file(path, content.getvalue(), mode=0o666)
    except (OSError, ValueError) as error:  # ValueError: it would be too large, for example
        raise click.ClickException(f"the picture cannot be written: {error}") from error


def plot_times(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a picture of time over size on logarithmic axes, a line for each benchmark.

    The area around a line extends from the fastest round to the slowest.
    """
    figure = new_figure(7, 4.5)
    axes: Any = figure.add_subplot()
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        points = [row for row in rows if row["benchmark"] == name]
        sizes = [row["size"] for row in points]
        axes.plot(sizes, [row["time"] for row in points], marker="o", label=name)
        least, most = [row["time_min"] for row in points], [row["time_max"] for row in points]
        axes.fill_between(sizes, least, most, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of an array")
    axes.set_ylabel("time (us): median, and fastest to slowest round")
    axes.set_title(title)
    axes.legend()
    save(figure, path)


def plot_timeline(path: Path, title: str, events: Sequence[Mapping[str, Any]], unit: str) -> None:
    """Draws a row for each device's queue, and a bar for each complete event.

    Operations that are not known to be done are hatched. ``unit`` is the unit of the times.
    """
    queues = sorted({(event["pid"], event["tid"]) for event in events})
    figure = new_figure(10, 1.5 + 0.4 * len(queues))
    axes: Any = figure.add_subplot()
    kinds = list(dict.fromkeys(event["cat"] for event in events))
    begin = min((event["ts"] for event in events), default=0)
    least = (max((event["ts"] + event["dur"] for event in events), default=0) - begin) / 500
    bars: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
    for event in events:
        row, done = (
            queues.index((event["pid"], event["tid"])),
            bool(event["args"].get("done", True)),
        )
        bar = event["ts"] - begin, max(event["dur"], least)  # wide enough to be visible
        bars.setdefault((row, event["cat"], done), []).append(bar)
    for (row, kind, done), spans in bars.items():
        color = f"C{kinds.index(kind)}"
        filled = {"color": color} if done else {"fc": "none", "ec": color, "hatch": "////"}
        axes.broken_barh(spans, (row - 0.4, 0.8), **filled)
    for number, kind in enumerate(kinds):
        axes.plot([], [], color=f"C{number}", linewidth=6, label=kind)
    names = [f"device {device} {'compute' if tid == 1 else 'transfer'}" for device, tid in queues]
    axes.set_yticks(range(len(queues)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    is_open = any(not done for _, _, done in bars)
    axes.set_title(f"{title} (hatched: not known to be done)" if is_open else title)
    if kinds:
        figure.legend(loc="outside lower center", ncols=len(kinds))
    save(figure, path)
