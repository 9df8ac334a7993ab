"""Section ``tests``: every test that needs a GPU, one pytest process for each file.

A file of its own process each, because a fault on a GPU spoils the process that it happened in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .section import Check, Checks, scratch
from .setting import Setting

__all__ = ["tests"]

# One GPU runs what one GPU can; where there are more, the tests that need fewer than there are.
ONE_GPU, SEVERAL_GPUS = "gpu and not multi_gpu", "gpu or multi_gpu"
# The suite runs all of them on the fake anyway (tests/test_fake_cupy.py); here they only show that
# this section works.
FAKE_PATHS = ("tests/device/test_contract_lifetime.py",)
MOST_NAMES = 50  # of tests that failed


def tests(setting: Setting) -> Checks:
    """Collects the tests, then runs file after file."""
    chosen = ("-m", SEVERAL_GPUS if setting.gpu.count > 1 else ONE_GPU)
    paths = FAKE_PATHS if setting.fake else ("tests",)
    collect = setting.pytest("-q", "--collect-only", *chosen, *paths)
    found = yield Check("collection", collect, read=counts_of)
    for path in found.figures:
        report = scratch(setting, path, ".xml")
        command = setting.pytest(*chosen, f"--junitxml={report}", path)
        yield Check(path, command, read=partial(summary_of, report))


def counts_of(output: str) -> Mapping[str, int]:
    """File -> how many of its tests were chosen, from ``pytest -qq --collect-only``."""
    lines = re.findall(r"^(\S+\.py): (\d+)$", output, re.MULTILINE)
    return {path: int(count) for path, count in lines}


def summary_of(report: Path, output: str) -> Mapping[str, Any]:
    """How many tests there were and how they ended, from pytest's JUnit report."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals: dict[str, int] = {}
    for suite in suites:
        for kind in ("tests", "failures", "errors", "skipped"):
            totals[kind] = totals.get(kind, 0) + int(suite.get(kind, "0"))
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(report).getroot().iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**totals, "failed": names[:MOST_NAMES]}
