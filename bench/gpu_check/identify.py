"""Identifies the GPU and its software versions."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

from measure.in_processes import words_of

from .child import Stop, run
from .setting import ROOT, Gpu, environment, python

LOOK_SECONDS = 60.0  # CuPy's first import on a cold disk, and the driver's start
FAKE = Gpu("fake", versions={"python": platform.python_version()})


def find(work: Path, stop: Stop) -> Gpu:
    """Returns the GPU of this machine, or the reason why there is none.

    A process of its own looks for it, because a broken driver may hang.
    """
    report = work / "gpu.json"
    ended = run(
        python(*words_of(report, "gpu_check.identify:look"), fake=False),
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


def commit() -> str | None:
    """Returns the commit of the repository, with ``+`` if files have changed."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or a copy without its history
    return head + "+" * bool(changed)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def sources() -> str:
    """Returns a hash of ``src`` and ``kernels``, also of a copy without git or with changes."""
    digest = hashlib.sha256()
    for folder, pattern in (("kernels", "*.cu*"), ("src", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def look() -> dict[str, Any]:
    """Returns CuPy's data of GPU 0 as arguments of ``Gpu``."""
    # CuPy warns of its own install: a library that is not found, a second copy of itself.
    warnings.simplefilter("ignore")
    try:
        import cupy
        import numpy as np
        from cupy.cuda import nccl, runtime

        count = int(runtime.getDeviceCount())
        if not count:
            return {"name": "none", "count": 0, "missing": "CuPy sees no device"}
        properties = runtime.getDeviceProperties(0)
    except (ImportError, RuntimeError) as error:  # CUDARuntimeError is a RuntimeError
        first = (str(error).splitlines() or ["no text"])[0]
        missing = f"no CUDA device ({type(error).__name__}: {first})"
        return {"name": "none", "count": 0, "missing": missing}
    return {
        "name": properties["name"].decode(),
        "count": count,
        "details": {
            "memory_bytes": int(properties["totalGlobalMem"]),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": int(properties["multiProcessorCount"]),
        },
        "versions": {
            "driver": int(runtime.driverGetVersion()),
            "runtime": int(runtime.runtimeGetVersion()),
            "cupy": str(cupy.__version__),
            "nccl": int(nccl.get_version()) if nccl.available else None,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
