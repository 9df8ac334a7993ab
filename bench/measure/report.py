"""How a benchmark ends: its figures in a file, and exit status 1 if a floor is broken."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["finish", "options_of"]


def options_of(doc: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """``--json FILE`` and ``--quick``, which every benchmark takes."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args(arguments)


def finish(report: Mapping[str, Any], path: Path | None) -> None:
    """Writes the report, if it is wanted, and exits with 1 if one of its floors is broken."""
    if path is not None:
        path.write_text(json.dumps(report), encoding="utf-8")
    broken = [one["floor"] for one in report["floors"] if one["holds"] is False]
    if broken:
        sys.exit(f"broken floors: {', '.join(broken)}")
