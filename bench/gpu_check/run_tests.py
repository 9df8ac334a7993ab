"""Section ``tests``: every test that needs a GPU, one pytest process for each file.

Each file runs in its own process, because a fault on a GPU makes its process unusable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .section import Check, Checks, Section, needing, scratch
from .setting import Setting

__all__ = ["file", "tests"]

# The suite runs all of them on the fake anyway (tests/project/test_fake_cupy.py); here they only
# show that this section works.
FAKE_PATHS = ("tests/device/test_contract_lifetime.py",)
# Files of which every test needs a library that knows the GPU.
LIBRARIES = {"tests/backends/cuda/test_jax.py": "jax", "tests/arrays/test_convert_gpu.py": "torch"}
COLLECT_SECONDS = 60.0
LEAST_SHARE = 1 / 8  # of the time, for the smallest file
MOST_NAMES = 50  # of tests that failed


def tests(setting: Setting) -> Checks:
    """Collects the tests, then runs each file; large ones have more time."""
    paths = (setting.part,) if setting.part else FAKE_PATHS if setting.fake else ("tests",)
    collect = setting.pytest("-q", "--collect-only", "-m", setting.mark, *paths)
    found = yield Check("collection", collect, COLLECT_SECONDS, read=counts_of)
    total = sum(found.figures.values())
    for path, count in found.figures.items():
        seconds = setting.limit * max(LEAST_SHARE, count / total)
        yield from run_file(path, seconds)(setting)


def file(path: str, seconds: float, keyword: str = "") -> Section:
    """Runs a file of tests; with the fake CuPy it only collects them."""

    def run(setting: Setting) -> Checks:
        if not setting.fake:
            yield from run_file(path, seconds, keyword)(setting)
            return
        words = ("-q", "--collect-only", "-m", setting.mark, *_chosen(keyword), path)
        name = f"{_named(path, keyword)}, collected"
        yield Check(name, setting.pytest(*words), COLLECT_SECONDS, read=counts_of)

    return run


def run_file(path: str, seconds: float, keyword: str = "") -> Section:
    """Runs the tests of a file.

    Args:
        path: of the file.
        seconds: its deadline.
        keyword: what pytest's ``-k`` takes; all tests by default.
    """
    name, library = _named(path, keyword), LIBRARIES.get(path)
    required = () if library is None else (f"--require={library}",)

    def run(setting: Setting) -> Checks:
        report = scratch(setting, name, ".xml")
        words = ("-m", setting.mark, *_chosen(keyword), *required, f"--junitxml={report}", path)
        yield Check(name, setting.pytest(*words), seconds, read=partial(summary_of, report))

    return run if library is None else needing(library, run, name)


def _named(path: str, keyword: str) -> str:
    return f"{path}, {keyword}" if keyword else path


def _chosen(keyword: str) -> tuple[str, ...]:
    return ("-k", keyword) if keyword else ()


def counts_of(output: str) -> Mapping[str, int]:
    """Parses ``pytest -qq --collect-only``; returns the number of tests per file."""
    lines = re.findall(r"^(\S+\.py): (\d+)$", output, re.MULTILINE)
    return {path: int(count) for path, count in lines}


def summary_of(report: Path, output: str) -> Mapping[str, Any]:
    """Parses pytest's JUnit report; returns the number of tests per outcome."""
    root = ElementTree.parse(report).getroot()  # noqa: S314  # written by our own pytest
    suites = root.iter("testsuite")
    totals: dict[str, int] = {}
    for suite in suites:
        for kind in ("tests", "failures", "errors", "skipped"):
            totals[kind] = totals.get(kind, 0) + int(suite.get(kind, "0"))
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in root.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**totals, "failed": names[:MOST_NAMES]}
