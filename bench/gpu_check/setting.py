"""The settings of a section: fake or real, which GPU and versions, how to start Python."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure.in_processes import words_of

from .child import Stop, run

ROOT = Path(__file__).resolve().parents[2]
# For processes on one GPU that NCCL takes for hosts: they exchange bytes by sockets.
APART = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
LOOK_SECONDS = 60.0  # CuPy's first import on a cold disk, and the driver's start


@dataclass(frozen=True)
class Gpu:
    """The first GPU, with its software versions."""

    name: str  # the driver's; "fake" for the fake CuPy, "none" if there is no GPU
    count: int = 1  # of all GPUs
    missing: str = ""  # why there is none
    details: Mapping[str, Any] = field(default_factory=dict)  # memory, compute capability, …
    versions: Mapping[str, Any] = field(default_factory=dict)  # of each library; None if unknown


FAKE = Gpu("fake", versions={"python": platform.python_version()})


@dataclass(frozen=True)
class Setting:
    fake: bool  # tests/fake_cupy replaces CuPy
    gpu: Gpu
    work: Path  # for files of the checks; it is removed after the run
    benches: Path  # the folder of the benchmarks
    limit: float = 480.0  # seconds of a section
    part: str = ""  # the only part of the section that runs; empty for all of it

    def python(self, *arguments: str) -> tuple[str, ...]:
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
    """Returns the path of a CUDA tool, also if it is not on PATH: of the newest CUDA."""
    usual = sorted(map(str, Path("/").glob("usr/local/cuda*/bin")), reverse=True)
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *usual)))


def commit() -> str | None:
    """Returns the commit of the repository, with ``+`` if files have changed."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True,
                              check=True, timeout=60)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or a copy without its history
    return done.stdout.strip()


def hosts(count: int, **more: str) -> list[dict[str, str]]:
    """Returns an environment for each of several processes, in which NCCL takes it for a host."""
    return [{**APART, **more, "NCCL_HOSTID": f"gradreduce-{rank}"} for rank in range(count)]


def sources() -> str:
    """Returns a hash of ``src`` and ``kernels``, also of a copy without git or with changes."""
    digest = hashlib.sha256()
    for folder, pattern in (("kernels", "*.cu*"), ("src", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find(work: Path, stop: Stop) -> Gpu:
    """Returns the GPU of this machine, or the reason why there is none.

    A process of its own looks for it, because a broken driver may hang.
    """
    report = work / "gpu.json"
    ended = run(
        python(*words_of(report, "gpu_check.setting:look"), fake=False),
        log=work / "gpu.log",
        cwd=ROOT,
        environment=environment(fake=False, work=work),
        deadline=time.monotonic() + LOOK_SECONDS,
        stop=stop,
    )
    if report.is_file():
        return Gpu(**json.loads(report.read_text(encoding="utf-8")))
    last = (ended.output.strip().splitlines() or ["no output"])[-1]
    why = stop.reason or f"looking for one ended with status {ended.status}: {last}"
    return Gpu("none", 0, why)


def look() -> dict[str, Any]:
    """Returns CuPy's data of GPU 0 as arguments of ``Gpu``."""
    # CuPy warns of its own install: a library that is not found, a second copy of itself.
    warnings.simplefilter("ignore")
    try:
        import cupy
        import numpy as np
        from cupy.cuda import nccl

        from gradreduce.backends.cuda.gpus import cuda_versions, list_gpus

        first, *others = list_gpus()
    except (ImportError, RuntimeError) as error:  # CUDARuntimeError is a RuntimeError
        line = (str(error).splitlines() or ["no text"])[0]
        missing = f"no CUDA device ({type(error).__name__}: {line})"
        return {"name": "none", "count": 0, "missing": missing}
    return {
        "name": first.name,
        "count": 1 + len(others),
        "details": {"memory_bytes": first.nbytes, "compute_capability": first.compute_capability},
        "versions": {
            **cuda_versions(),
            "cupy": str(cupy.__version__),
            "nccl": int(nccl.get_version()) if nccl.available else None,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
