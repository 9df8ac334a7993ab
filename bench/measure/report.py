"""Reports of benchmarks: a JSON file, and exit status 1 if a floor is broken."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .case import Case
from .floors import Floor, kept

__all__ = ["finish", "keep", "options_of", "report_of"]


class Measured(Protocol):
    """The results of a benchmark.

    Attributes:
        cases: the measured cases, by name.
        absent: why a library is missing, by its name.
    """

    cases: dict[str, Case]
    absent: dict[str, str]


def options_of(doc: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses ``--json FILE`` and ``--quick``, the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args(arguments)


def keep(figures: Mapping[str, Any], path: Path | None) -> None:
    """Writes figures to a file if one was given."""
    if path is not None:
        path.write_text(json.dumps(figures), encoding="utf-8")


def report_of(
    implementations: Sequence[str],
    load: float,
    bench: Measured,
    floors: tuple[Floor, ...],
    *,
    quick: bool,
) -> dict[str, Any]:
    """Prints missing libraries, checks the floors, and returns a report for JSON.

    Args:
        implementations: implementations of the kernels that were measured.
        load: the load average of the machine when the run began.
        bench: the benchmark, after its cases have run.
        floors: the floors for this kind of machine.
        quick: sizes were tiny, so no floor is checked.
    """
    for library, why in bench.absent.items():
        print(f"{library}: {why}")
    return {
        "implementations": list(implementations),
        "load_average": load,
        "absent": bench.absent,
        "cases": [case.as_json() for case in bench.cases.values()],
        "floors": [] if quick else kept(floors, bench.cases, bench.absent),
    }


def finish(report: Mapping[str, Any], path: Path | None) -> None:
    """Writes the report if asked, and exits with 1 if a floor is broken."""
    keep(report, path)
    broken = [one["floor"] for one in report["floors"] if one["holds"] is False]
    if broken:
        sys.exit(f"broken floors: {', '.join(broken)}")
