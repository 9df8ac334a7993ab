"""Counters of NVIDIA's profiler ``ncu`` for one launch, for section ``first``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import partial

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
WARM_UPS = 2  # launches of the program that are not counted


def counters(kernel: str, seconds: float) -> Section:
    """Profiles the last launch of ``gpu_check.launches``."""

    def run(setting: Setting) -> Checks:
        name = f"{TOOL} {kernel}"
        if setting.fake:
            yield from program(f"{name}, launched", "launches", seconds, kernel)(setting)
            return
        tool = find_tool(TOOL)
        if tool is None:
            yield skipped(name, f"{TOOL} is not installed")
            return
        options = (
            "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS.values()),
            "--kernel-name", f"regex:^{kernel}", "--launch-skip", str(WARM_UPS),
            "--launch-count", "1",
        )  # fmt: skip
        words = setting.python("-m", "gpu_check.launches", kernel)
        plain = {"LC_ALL": "C"}  # a decimal point
        read = partial(metrics_of, kernel)
        yield Check(name, (tool, *options, *words), seconds, plain, read, skips=REFUSED)

    return run


def metrics_of(kernel: str, output: str) -> Mapping[str, float | str]:
    """Parses ncu's table in the output of a program; returns figures by our names.

    Raises:
        ValueError: a metric is missing, or of another kernel.
    """
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if kernel in (row["Kernel Name"] or "")]
    found = {row["Metric Name"]: row for row in rows}
    missing = [name for name in METRICS.values() if name not in found]
    if missing:
        raise ValueError(f"ncu printed no {', '.join(missing)} of {kernel}")
    figures = {
        name: float(found[metric]["Metric Value"].replace(",", ""))
        for name, metric in METRICS.items()
    }
    return {**figures, "duration_unit": found[METRICS["duration"]]["Metric Unit"]}
