"""Section ``nccl``: real NCCL with several ranks on one GPU.

NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), with two exceptions:

* ``one process``: from NCCL 2.30 on ``NCCL_MULTI_RANK_GPU_ENABLE=1`` allows it, as an experiment:
  about two ranks with the defaults, more with fewer CTAs, without NVLS. It hangs if the GPU's
  resources run out.
* ``processes``: with every version, one process for each rank, each with its own host name, which
  exchange bytes only by sockets of the loopback device. This tests correctness, not speed.

Every check has its own deadline, and a hang ends that check alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from .section import Check, Checks, report_of, scratch, skipped
from .setting import Setting

__all__ = ["apart", "nccl", "one_rank", "version"]

SECONDS = 65.0  # seven of them fit a section
FIRST_TO_SHARE = 23000  # NCCL 2.30.0, as get_version() spells it
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_DEBUG": "WARN",
}
NUM_RANKS = (2, 4)


def nccl(setting: Setting) -> Checks:
    """Runs the checks that the installed NCCL version supports."""
    found = yield _check(setting, "NCCL's version", "version")
    yield from one_rank(setting)
    for num_ranks in NUM_RANKS:
        name = f"one process, {num_ranks} ranks on one GPU"
        if found.figures.get("version", 0) >= FIRST_TO_SHARE:
            yield _check(setting, name, "together", num_ranks, SHARED_GPU)
        else:
            yield skipped(name, f"NCCL {found.figures.get('version')} is below {FIRST_TO_SHARE}")
    for num_ranks in NUM_RANKS[:1] if setting.fake else NUM_RANKS:
        yield from apart(setting, num_ranks)
    name = "a deadline ends an all-reduce that one rank does not join"
    if setting.fake:
        yield skipped(name, "the fakes of two processes share nothing")
    else:
        yield _check(setting, name, "hang", 2)


def version(setting: Setting) -> Checks:
    """Checks the NCCL version."""
    yield _check(setting, "NCCL's version", "version")


def one_rank(setting: Setting) -> Checks:
    """Runs one rank in one process."""
    yield _check(setting, "one process, 1 rank", "together", 1)


def apart(setting: Setting, num_ranks: int = 2) -> Checks:
    """Runs a process for each rank."""
    if not setting.fake:
        yield _check(setting, f"a process for each of {num_ranks} ranks", "apart", num_ranks)
        return
    # Its communicators live in one process; one rank shows that the program works.
    yield _check(setting, "a process for each of 1 rank", "apart", 1)
    yield skipped("a process for each rank", "the fakes of two processes share nothing")


def _check(
    setting: Setting,
    name: str,
    way: str,
    num_ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Check:
    report = scratch(setting, name, ".json")
    words = ("-m", "gpu_check.ranks", way, str(num_ranks), str(report), *setting.quick)
    read = partial(report_of, report)
    return Check(name, setting.python(*words), SECONDS, environment or {"NCCL_DEBUG": "WARN"}, read)
