"""Runs the benchmarks one after the other, keeps their figures, and writes the pages of docs/.

Figures go to ``bench/results/cpu/NAME.json``, or ``bench/results/gpu/NAME.json`` where CuPy finds a
GPU, with machine, versions, command, date and load average. A benchmark that fails, does not end in
time or lacks its library is named, and its earlier file stays. Figures that miss a floor are
written too; then ``page.py --check`` fails. Run this on a machine without other work; otherwise
``--busy`` marks the figures.

    python bench/record.py [NAME...] [--minutes 10] [--busy]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import page
from measure.runner import gpu_name, has_gpu

from gradreduce.cli.system_info import processor

BENCH = Path(__file__).resolve().parent
LIBRARIES = ("numpy", "torch", "jax", "tensorflow", "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "ray")
DIGITS = 4  # that are kept of a figure


def machine() -> dict[str, Any]:
    """Returns processor, GPU, memory and versions, on which the figures depend."""
    versions = {}
    for library in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {
        **({"gpu": gpu_name()} if has_gpu() else {}),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "versions": versions,
    }


def rounded(text: str) -> float:
    """Returns a number with fewer digits."""
    return float(f"{float(text):.{DIGITS}g}")


def kept(report: dict[str, Any], name: str, date: str, *, busy: bool) -> str:
    """Returns the text of a file of results: a line for each case."""
    head = {
        "benchmark": name,
        "command": f"python bench/bench_{name}.py",
        "date": date,
        "busy": busy,
        "machine": machine(),
    }
    report.pop("floors", None)  # page.py checks them again
    for case in report.get("cases", []):
        took = case["took"]
        case["took"] = {key: {"seconds": each["seconds"]} for key, each in took.items()}
    entries = []
    for key, value in json.loads(json.dumps(head | report), parse_float=rounded).items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def run(name: str, seconds: float) -> dict[str, Any] | None:
    """Runs a benchmark; returns its report, or None and says why if it has no figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(BENCH / f"bench_{name}.py"), "--json", str(report)]
        why = "wrote no report"
        try:
            subprocess.run(command, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            why = "did not end in time"
        found: dict[str, Any] = json.loads(report.read_text("utf-8")) if report.exists() else {}
        if found.get("cases") == []:
            why = "; ".join(f"{what}: {reason}" for what, reason in found["absent"].items())
        elif found:
            return found
        print(f"{name}: not measured ({why})", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = page.names()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of them together")
    parser.add_argument("--busy", action="store_true", help="the machine does other work too")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"{', '.join(unknown)}: not of {', '.join(names)}")
    folder = page.RESULTS / ("gpu" if has_gpu() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for name in options.names or names:
        report = run(name, max(1.0, end - time.monotonic()))
        if report is not None:
            text = kept(report, name, datetime.now(UTC).date().isoformat(), busy=options.busy)
            (folder / f"{name}.json").write_text(text, "utf-8")
    page.write()


if __name__ == "__main__":
    main()
