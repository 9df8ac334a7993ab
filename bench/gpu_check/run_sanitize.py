"""Section ``sanitize``: NVIDIA's compute-sanitizer over tests that launch every kernel.

Our kernels have no shared memory and no barrier, so racecheck has little to find, and is run on
the smallest set; memcheck runs on all of it, with every block a ``cudaMalloc`` of its own
(``unpooled``), because the sanitizer does not know where a pool's blocks end.
"""

from __future__ import annotations

import os
import shutil

from .record import FAILED, PASSED
from .section import Check, Checks, skipped
from .setting import Setting

__all__ = ["sanitize"]

TOOL = "compute-sanitizer"
USUAL_FOLDER = "/usr/local/cuda/bin"
FOUND_FAULTS = 86  # the exit status that we ask for, unlike any of pytest's
OPS, SEGMENTS = "tests/cuda/test_ops.py", "tests/cuda/test_segments.py"
LAUNCHES = "tests/device/test_contract_launch.py"
# tool -> which tests, and how long
RUNS: dict[str, tuple[tuple[str, ...], float]] = {
    "memcheck": ((OPS, SEGMENTS, LAUNCHES), 200.0),
    "initcheck": ((OPS, SEGMENTS, "-k", "float32"), 120.0),
    "racecheck": ((OPS, "-k", "float32 and add_n"), 100.0),
}


def sanitize(setting: Setting) -> Checks:
    """Tries the tool on a trivial program, then runs its tools one after another."""
    path = os.pathsep.join((os.environ.get("PATH", ""), USUAL_FOLDER))
    tool = shutil.which(TOOL, path=path)
    if setting.fake:
        yield skipped(TOOL, "the fake GPU runs on the CPU; its launches are checked there")
        return
    if tool is None:
        yield skipped(TOOL, f"it is neither on PATH nor in {USUAL_FOLDER}")
        return
    probe = "import cupy; print('probed', cupy.zeros(3).sum())"
    start = (tool, "--error-exitcode", str(FOUND_FAULTS))
    tried = yield Check("probe", (*start, *setting.python("-c", probe)), 60.0)
    if tried.outcome == FAILED and "Device not supported" in tried.tail:
        yield skipped(TOOL, "it does not support this device")
        return
    if tried.outcome != PASSED:
        return
    for name, (chosen, seconds) in RUNS.items():
        marked = ("-m", "gpu and not multi_gpu", "-p", "gpu_check.unpooled", *chosen)
        command = (*start, "--tool", name, *setting.pytest(*marked))
        yield Check(name, command, seconds)
