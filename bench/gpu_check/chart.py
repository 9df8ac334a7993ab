"""Draws the speed of each operation of ``bench_ops.py``, as a share of a copy of the same bytes.

    python -m gpu_check.chart FOLDER PICTURE

FOLDER has the JSON files of a run of ``gpu_check``; the last one with ``bench_ops.py`` counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCH, OURS, COPY = "bench_ops.py", "gradreduce cuda", "copy"
GIGABYTES = "median_gigabytes_per_second"


def read(folder: Path) -> tuple[str, dict[str, float]]:
    """Returns the GPU's name with its copy rate, and the share of each case.

    Raises:
        ValueError: no file has figures of ``bench_ops.py``.
    """
    title, shares = "", {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        figures = {result["name"]: result["figures"] for result in record["results"]}
        cases = figures.get(BENCH, {}).get("cases", ())
        took = {case["name"]: case["took"] for case in cases}
        found = {
            name: times[COPY]["seconds"] / times[OURS]["seconds"]
            for name, times in took.items()
            if COPY in times and OURS in times
        }
        if found:
            rate = figures.get("copy rate", {}).get(GIGABYTES)
            title = record["gpu"] + (f", which copies {rate:.0f} GB/s" if rate else "")
            shares = found
    if not shares:
        raise ValueError(f"no file of {folder} has figures of {BENCH}")
    return title, shares


if __name__ == "__main__":
    from matplotlib.figure import Figure

    title, shares = read(Path(sys.argv[1]))
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(shares)[::-1], list(shares.values())[::-1])  # the first one on top
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(xlabel="speed as a share of a copy of the same bytes", ylabel="operation", title=title)
    axes.set_xlim(0, 1.15 * max(1.0, *shares.values()))
    figure.savefig(sys.argv[2])
