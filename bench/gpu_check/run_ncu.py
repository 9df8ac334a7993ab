"""Counters of NVIDIA's profiler ``ncu`` for a launch of each kernel, for section ``first``."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

from .launches import functions
from .run_bench import program
from .section import Check, Checks, Section, find_tool, skipped
from .setting import Setting

__all__ = ["METRICS", "counters", "metrics_of"]

TOOL = "ncu"
# our name -> ncu's: percent of the memory's peak rate, percent of the warps that fit a
# multiprocessor, registers, blocks that fit by registers alone, microseconds
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers_per_thread": "launch__registers_per_thread",
    "blocks_by_registers": "launch__occupancy_limit_registers",
    "duration": "gpu__time_duration.sum",
}
# Why the counters cannot be read, by what ncu prints then.
REFUSED = {
    "ERR_NVGPUCTRPERM": "the driver lets only administrators read the counters",
    "Failed to prepare kernel for profiling": "ncu cannot profile on this machine",
    "Profiling is not supported on device": "ncu does not support this device",
}


def counters(seconds: float) -> Section:
    """Profiles every launch of ``gpu_check.launches``; the last one of each kernel counts."""

    def run(setting: Setting) -> Checks:
        if setting.fake:
            yield from program(f"{TOOL}, launched", "launches", seconds)(setting)
            return
        tool = find_tool(TOOL)
        if tool is None:
            yield skipped(TOOL, f"{TOOL} is not installed")
            return
        names = "|".join(sorted(set(functions().values())))
        options = (
            "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values()),
            "--kernel-name-base", "function", "--kernel-name", f"regex:^({names})$",
        )  # fmt: skip
        words = setting.python("-m", "gpu_check.launches")
        plain = {"LC_ALL": "C"}  # a decimal point
        yield Check(TOOL, (tool, *options, *words), seconds, plain, metrics_of, skips=REFUSED)

    return run


def metrics_of(output: str) -> Mapping[str, Mapping[str, float | str]]:
    """Parses ncu's table in the output of a program; returns figures of each kernel by our names.

    Raises:
        ValueError: a metric of a kernel is missing.
    """
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return {name: _metrics_of(function, rows) for name, function in functions().items()}


def _metrics_of(function: str, rows: Sequence[Mapping[str, str]]) -> Mapping[str, float | str]:
    """Returns the figures of the last launch of a function."""
    mine = [row for row in rows if re.search(rf"\b{function}\b", row["Kernel Name"] or "")]
    found = {row["Metric Name"]: row for row in mine}
    missing = [name for name in METRICS.values() if name not in found]
    if missing:
        raise ValueError(f"ncu printed no {', '.join(missing)} of {function}")
    figures = {
        name: float(found[metric]["Metric Value"].replace(",", ""))
        for name, metric in METRICS.items()
    }
    return {**figures, "duration_unit": found[METRICS["duration"]]["Metric Unit"]}
