"""Section ``sanitize``: compute-sanitizer on a few launches of common kernels.

It slows a launch many times, so that only small sets of tests end in time. Our kernels have no
shared memory and no barrier, so racecheck has little to find. Every block is allocated by its own
``cudaMalloc`` (``unpooled``), because the sanitizer does not know where the blocks of a pool end.
"""

from __future__ import annotations

from .record import PASSED
from .section import Check, Checks, Section, find_tool, skipped
from .setting import Setting

__all__ = ["sanitize", "sanitizer"]

TOOL = "compute-sanitizer"
FOUND_FAULTS = 86  # the exit status that we ask for, unlike any of pytest's
OPS = "tests/backends/cuda/test_ops.py"
PROBE_SECONDS = 45.0
# tool -> which tests, and its deadline
RUNS = {
    "memcheck": ("float32 and (pack or add_n)", 120.0),
    "initcheck": ("float32 and add_n", 120.0),
    "racecheck": ("float32 and add_n", 120.0),
}


def sanitizer(*names: str) -> Section:
    """Runs a trivial program under compute-sanitizer, then each of its tools."""

    def run(setting: Setting) -> Checks:
        tool = find_tool(TOOL)
        if setting.fake or tool is None:
            fake = "the fake GPU runs on the CPU; its launches are checked there"
            yield skipped(TOOL, fake if setting.fake else "it is not installed")
            return
        start = (tool, "--error-exitcode", str(FOUND_FAULTS))
        probe = (*start, *setting.python("-c", "import cupy; print(cupy.zeros(3).sum())"))
        skips = {"Device not supported": "it does not support this device"}
        tried = yield Check(f"{TOOL} itself", probe, PROBE_SECONDS, skips=skips)
        for name in names if tried.outcome == PASSED else ():
            keyword, seconds = RUNS[name]
            words = ("-m", setting.mark, "-k", keyword, "-p", "gpu_check.unpooled", OPS)
            yield Check(name, (*start, "--tool", name, *setting.pytest(*words)), seconds)

    return run


sanitize = sanitizer(*RUNS)
