"""Draws the speed of each operation of ``bench_ops.py``, as a share of a copy of the same bytes.

    python -m gpu_check.chart FOLDER PICTURE

FOLDER has the JSON files of a run of ``gpu_check``; the last one with ``bench_ops.py`` counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH, OURS, COPY = "bench_ops.py", "gradreduce cuda", "copy"
GIGABYTES = "median_gigabytes_per_second"
INCHES, DPI = (8.0, 5.0), 120


def read(folder: Path) -> tuple[str, dict[str, float]]:
    """Returns the GPU's name with its copy rate, and the share of each case.

    Raises:
        ValueError: no file has figures of ``bench_ops.py``.
    """
    title, shares = "", {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        figures = {result["name"]: result["figures"] for result in record["results"]}
        found = shares_of(figures.get(BENCH, {}))
        if found:
            rate = figures.get("copy rate", {}).get(GIGABYTES)
            title = record["gpu"] + (f", which copies {rate:.0f} GB/s" if rate else "")
            shares = found
    if not shares:
        raise ValueError(f"no file of {folder} has figures of {BENCH}")
    return title, shares


def shares_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns the time of the copy over ours, by case, of a report of ``bench_ops.py``."""
    took = {case["name"]: case["took"] for case in report.get("cases", ())}
    return {
        name: times[COPY]["seconds"] / times[OURS]["seconds"]
        for name, times in took.items()
        if COPY in times and OURS in times
    }


def draw(title: str, shares: Mapping[str, float], picture: Path) -> None:
    """Writes a bar chart to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    names = list(shares)[::-1]  # the first one on top
    bars = axes.barh(names, [shares[name] for name in names])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("speed as a share of a copy of the same bytes")
    axes.set_ylabel("operation")
    axes.set_xlim(0, 1.15 * max(1.0, *shares.values()))
    axes.set_title(title)
    figure.savefig(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the chart."""
    folder, picture = map(Path, sys.argv[1:] if arguments is None else arguments)
    draw(*read(folder), picture)


if __name__ == "__main__":
    main()
