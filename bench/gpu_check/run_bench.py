"""Section ``bench``: the rate of a plain copy, and every benchmark that there is.

A benchmark is a file ``bench_*.py`` that takes ``--json FILE`` and ``--quick``; bench/README.md
says what the two mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .section import Check, Checks, scratch
from .setting import Setting

__all__ = ["bench"]


def bench(setting: Setting) -> Checks:
    """The copy first: other figures are read beside it."""
    quick = ("--quick",) if setting.fake else ()
    report = scratch(setting, "copy rate", ".json")
    command = setting.python("-m", "gpu_check.copy_rate", "--json", str(report), *quick)
    yield Check("copy rate", command, read=partial(_reported, report))
    for script in sorted(setting.benches.glob("bench_*.py")):
        report = scratch(setting, script.name, ".json")
        command = setting.python(str(script), "--json", str(report), *quick)
        yield Check(script.name, command, read=partial(_reported, report))


def _reported(report: Path, output: str) -> Mapping[str, Any]:
    figures: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return figures
