"""Section ``bench``: the rate of a plain copy, and every benchmark.

A benchmark is a file ``bench_*.py`` that takes ``--json FILE`` and ``--quick``, which
bench/README.md describes.
"""

from __future__ import annotations

from functools import partial

from .section import Check, Checks, Section, report_of, scratch
from .setting import Setting

__all__ = ["bench", "program", "script"]


def bench(setting: Setting) -> Checks:
    """Runs the copy rate, then every benchmark, with equal time limits."""
    chosen = setting.part or "bench_*.py"
    names = [path.name for path in sorted(setting.benches.glob(chosen))]
    seconds = setting.limit / (1 + len(names))
    yield from program("copy rate", "copy_rate", seconds)(setting)
    for name in names:
        yield from script(name, seconds)(setting)


def script(name: str, seconds: float) -> Section:
    """Runs a benchmark script."""

    def run(setting: Setting) -> Checks:
        report = scratch(setting, name, ".json")
        words = (str(setting.benches / name), "--json", str(report), *setting.quick)
        yield Check(name, setting.python(*words), seconds, read=partial(report_of, report))

    return run


def program(name: str, module: str, seconds: float, *words: str, **environment: str) -> Section:
    """Runs a module of ``gpu_check`` that takes ``--json FILE`` and ``--quick``.

    Args:
        name: name of the check.
        module: name of the module in ``gpu_check``.
        seconds: its deadline.
        words: the first arguments.
        environment: variables to add to the environment of all children.
    """

    def run(setting: Setting) -> Checks:
        report = scratch(setting, name, ".json")
        flags = ("--json", str(report), *setting.quick)
        command = setting.python("-m", f"gpu_check.{module}", *words, *flags)
        yield Check(name, command, seconds, environment, partial(report_of, report))

    return run
