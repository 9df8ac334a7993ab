"""The settings of a section: fake or real, which GPU, how to start Python."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
USUAL_FOLDERS = ("usr/local/cuda*/bin",)  # of CUDA's tools


@dataclass(frozen=True)
class Gpu:
    """The first GPU, with its software versions."""

    name: str  # the driver's; "fake" for the fake CuPy, "none" if there is no GPU
    count: int = 1  # of all GPUs
    missing: str = ""  # why there is none
    details: Mapping[str, Any] = field(default_factory=dict)  # memory, compute capability, …
    versions: Mapping[str, Any] = field(default_factory=dict)  # of each library; None if unknown


@dataclass(frozen=True)
class Setting:
    """The settings of a run."""

    fake: bool  # tests/fake_cupy replaces CuPy
    gpu: Gpu
    work: Path  # for files of the checks; it is removed after the run
    benches: Path  # the folder of the benchmarks
    limit: float = 480.0  # seconds of a section
    part: str = ""  # the only part of the section that runs; empty for all of it

    def python(self, *arguments: str) -> tuple[str, ...]:
        """Returns the command of a Python process; see ``python``."""
        return python(*arguments, fake=self.fake)

    def pytest(self, *arguments: str) -> tuple[str, ...]:
        """Returns the command of a run of the tests for these GPUs; without one they fail."""
        mark = "gpu or multi_gpu" if self.gpu.count > 1 else "gpu and not multi_gpu"
        plugin = ("-p", "fake_cupy.plugin") if self.fake else ()
        plain = ("-q", "-p", "no:cacheprovider", "--require-gpu", "-m", mark)
        return (sys.executable, "-P", "-m", "pytest", *plugin, *plain, *arguments)

    def scratch(self, name: str, suffix: str = ".json") -> Path:
        """Returns the path of a temporary file for a check."""
        plain = "".join(letter if letter.isalnum() else "-" for letter in name)
        return self.work / f"{plain}{suffix}"


def python(*arguments: str, fake: bool) -> tuple[str, ...]:
    """Returns the command of a Python process; ``arguments`` begin with a script or ``-m``."""
    stand_in = ("-m", "fake_cupy") if fake else ()
    return (sys.executable, "-P", *stand_in, *arguments)


def environment(*, fake: bool, work: Path) -> dict[str, str]:
    """Returns the environment of child processes, without variables that change results."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADREDUCE_")}
    path = kept.get("PYTHONPATH", "")
    if fake:
        path = os.pathsep.join(filter(None, (str(ROOT / "tests"), path)))
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        # The plugins of whatever else is installed have no part in these tests.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(work / "hypothesis"),
        # JAX would take three quarters of the GPU's memory when it starts.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }


def find_tool(name: str) -> str | None:
    """Returns the path of a CUDA tool, also if it is not on PATH."""
    usual = [path for pattern in USUAL_FOLDERS for path in sorted(Path("/").glob(pattern))]
    newest_first = map(str, reversed(usual))
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *newest_first)))
