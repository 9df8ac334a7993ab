"""The sections of ``gpu_check``, whose checks ``first`` shares."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .record import FAILED, PASSED, Result, skipped
from .section import Check, Checks, Section, function, needing, report_of, section
from .setting import ROOT, Setting, find_tool

OPS = "tests/backends/cuda/test_ops.py"

# -- tests -----------------------------------------------------------------------------------------

# The suite runs all of them on the fake anyway (tests/project/test_fake_cupy.py); here they only
# show that this section works.
FAKE_PATHS = ("tests/device/test_contract_lifetime.py",)
# Files of which every test needs a library that knows the GPU.
LIBRARIES = {"tests/backends/cuda/test_jax.py": "jax", "tests/arrays/test_convert_gpu.py": "torch"}
COLLECT_SECONDS = 60.0
LEAST_SHARE = 1 / 8  # of the time, for the smallest file
MOST_NAMES = 50  # of tests that failed


def tests(setting: Setting) -> Checks:
    """Collects the tests, then runs each file; large ones have more time.

    Each runs in its own process, because a fault on a GPU makes its process unusable.
    """
    paths = (setting.part,) if setting.part else FAKE_PATHS if setting.fake else ("tests",)
    collect = setting.pytest("-q", "--collect-only", *paths)
    found = yield Check("collection", collect, COLLECT_SECONDS, read=counts_of)
    total = sum(found.figures.values())
    for path, count in found.figures.items():
        seconds = setting.limit * max(LEAST_SHARE, count / total)
        yield run_file(setting, path, seconds)


@section
def file(setting: Setting, path: str, seconds: float, keyword: str = "") -> Checks:
    """Runs a file of tests; with the fake CuPy it only collects them."""
    if setting.fake:
        command = setting.pytest("-q", "--collect-only", "-k", keyword, path)
        name = f"{named(path, keyword)}, collected"
        yield Check(name, command, COLLECT_SECONDS, read=counts_of)
    else:
        yield run_file(setting, path, seconds, keyword)


def run_file(setting: Setting, path: str, seconds: float, keyword: str = "") -> Check | Result:
    """Returns what runs the tests of a file, all or those of pytest's ``-k``."""
    name, library = named(path, keyword), LIBRARIES.get(path)
    report = setting.scratch(name, ".xml")
    required = () if library is None else (f"--require={library}",)
    command = setting.pytest("-k", keyword, *required, f"--junitxml={report}", path)
    check = Check(name, command, seconds, read=lambda output: summary_of(report))
    return check if library is None else needing(library, check)


def named(path: str, keyword: str) -> str:
    """Returns the name of a check."""
    return f"{path}, {keyword}" if keyword else path


def counts_of(output: str) -> Mapping[str, int]:
    """Parses ``pytest -qq --collect-only``; returns the number of tests per file."""
    lines = re.findall(r"^(\S+\.py): (\d+)$", output, re.MULTILINE)
    return {path: int(count) for path, count in lines}


def summary_of(report: Path) -> Mapping[str, Any]:
    """Parses pytest's JUnit report; returns the number of tests per outcome."""
    root = ElementTree.parse(report).getroot()  # noqa: S314  # written by our own pytest
    totals: dict[str, int] = {}
    for suite in root.iter("testsuite"):
        for kind in ("tests", "failures", "errors", "skipped"):
            totals[kind] = totals.get(kind, 0) + int(suite.get(kind, "0"))
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in root.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**totals, "failed": names[:MOST_NAMES]}


# -- bench -----------------------------------------------------------------------------------------


def bench(setting: Setting) -> Checks:
    """Runs the copy rate, then every benchmark, with equal time limits."""
    chosen = setting.part or "bench_*.py"
    names = [path.name for path in sorted(setting.benches.glob(chosen))]
    seconds = setting.limit / (1 + len(names))
    yield from function("copy rate", "programs:copy_rate", seconds)(setting)
    for name in names:
        yield from script(name, seconds)(setting)


@section
def script(setting: Setting, name: str, seconds: float) -> Checks:
    """Runs a benchmark, which takes ``--json FILE`` and ``--quick``."""
    report = setting.scratch(name)
    words = [str(setting.benches / name), "--json", str(report), *["--quick"] * setting.fake]
    yield Check(name, setting.python(*words), seconds, read=report_of(report))


# -- example ---------------------------------------------------------------------------------------

NEEDED = ("sklearn", "matplotlib", "rich")
ALGORITHMS = ("hierarchical_copy", "nccl")
NUM_DEVICES = 8
STEPS, FAKE_STEPS = 150, 4  # 500, the example's own number, took an H100 over 40 s
LARGEST_DIFFERENCE = 0.03  # of the accuracies; 11 of the 360 test images
SHARE = 1 / (2 * len(ALGORITHMS))  # of the time, for each training
BELOW_GOAL = 1  # the example's exit status when the accuracy is below its goal


def example(setting: Setting) -> Checks:
    """Trains the digits with each algorithm on both backends, and compares their accuracies.

    Their bits differ, because each backend computes its gradients by its own library, and cuBLAS
    adds the products of a matrix in another order. (With the fake CuPy both are NumPy's.)
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield skipped("the digits", f"not installed: {', '.join(missing)}")
        return
    for algorithm in ALGORITHMS[:1] if setting.fake else ALGORITHMS:
        wanted = yield training(setting, algorithm, "sim")
        found = yield training(setting, algorithm, "cuda")
        if wanted.outcome == found.outcome == PASSED:
            yield comparison(algorithm, found.figures, wanted.figures)


def training(setting: Setting, algorithm: str, backend: str) -> Check:
    """Trains with an algorithm on a backend."""
    name = f"{algorithm} on {backend}"
    command = setting.python(
        str(ROOT / "examples" / "train_digits.py"), f"--backend={backend}",
        f"--devices={NUM_DEVICES}", f"--placement={','.join('0' * NUM_DEVICES)}",
        f"--all-reduce={algorithm}", f"--steps={FAKE_STEPS if setting.fake else STEPS}",
        f"--output={setting.scratch(name, '.png')}",
    )  # fmt: skip
    passes = frozenset({0, BELOW_GOAL} if setting.fake else {0})  # so few steps reach no goal
    return Check(name, command, SHARE * setting.limit, read=table_of, passes=passes)


def table_of(output: str) -> Mapping[str, Any]:
    """Parses the table that the example prints."""
    rows = dict(re.findall(r"^│\s*(\S.*?)\s*│\s*(\S.*?)\s*│$", output, re.MULTILINE))
    return {
        "accuracy": float(rows["test accuracy"]),
        "digest": rows["digest of the weights"],
        "steps_per_second": float(rows["steps/s"]),
        "launches_per_step": float(rows["launches per step"]),
    }


def comparison(algorithm: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Result:
    """Returns whether the accuracies of the two backends agree."""
    difference = found["accuracy"] - wanted["accuracy"]
    figures = {
        "same_bits": found["digest"] == wanted["digest"],
        "accuracy_difference": difference,
    }
    name = f"{algorithm}: cuda and sim agree"
    if abs(difference) <= LARGEST_DIFFERENCE:
        return Result(name, PASSED, 0.0, figures)
    reason = f"accuracies {found['accuracy']} and {wanted['accuracy']} differ"
    return Result(name, FAILED, 0.0, figures, reason)


# -- nccl ------------------------------------------------------------------------------------------

# NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), with two exceptions. From 2.30 on
# NCCL_MULTI_RANK_GPU_ENABLE allows it in one process, as an experiment: about two ranks with the
# defaults, more with fewer CTAs, without NVLS. It hangs if the GPU's resources run out. With every
# version one process for each rank, each with its own host name, may exchange bytes by sockets.
RANKS_SECONDS = 65.0  # seven of them fit a section
FIRST_TO_SHARE = 23000  # NCCL 2.30.0, as get_version() spells it
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_DEBUG": "WARN",
}
NUM_RANKS = (2, 4)


def ranks(name: str, way: str, *num_ranks: int, **environment: str) -> Section:
    """Calls a function of ``gpu_check.ranks``."""
    changed = {"NCCL_DEBUG": "WARN", **environment}
    return function(name, f"ranks:{way}", RANKS_SECONDS, *num_ranks, **changed)


nccl_version = ranks("NCCL's version", "version")
one_rank = ranks("one process, 1 rank", "together", 1)


def nccl(setting: Setting) -> Checks:
    """Runs the checks that the installed NCCL version supports."""
    (check,) = nccl_version(setting)
    found = yield check
    yield from one_rank(setting)
    installed = found.figures.get("version")
    for num_ranks in NUM_RANKS:
        name = f"one process, {num_ranks} ranks on one GPU"
        if (installed or 0) >= FIRST_TO_SHARE:
            yield from ranks(name, "together", num_ranks, **SHARED_GPU)(setting)
        else:
            yield skipped(name, f"NCCL {installed} is below {FIRST_TO_SHARE}")
    for num_ranks in NUM_RANKS[:1] if setting.fake else NUM_RANKS:
        yield from apart(setting, num_ranks)
    name = "a deadline ends an all-reduce that one rank does not join"
    if setting.fake:
        yield skipped(name, "the fakes of two processes share nothing")
    else:
        yield from ranks(name, "hang", 2)(setting)


def apart(setting: Setting, num_ranks: int = 2) -> Checks:
    """Runs a process for each rank."""
    if not setting.fake:
        name = f"a process for each of {num_ranks} ranks"
        yield from ranks(name, "apart", num_ranks)(setting)
        return
    # Its communicators live in one process; one rank shows that the program works.
    yield from ranks("a process for each of 1 rank", "apart", 1)(setting)
    yield skipped("a process for each rank", "the fakes of two processes share nothing")


# -- sanitize --------------------------------------------------------------------------------------

# It slows a launch many times, so that only small sets of tests end in time. Our kernels have no
# shared memory and no barrier, so racecheck has little to find.
SANITIZER = "compute-sanitizer"
FOUND_FAULTS = 86  # the exit status that we ask for, unlike any of pytest's
PROBE_SECONDS = 45.0
# tool -> which tests, and its deadline
SANITIZER_RUNS = {
    "memcheck": ("float32 and (pack or add_n)", 120.0),
    "initcheck": ("float32 and add_n", 120.0),
    "racecheck": ("float32 and add_n", 120.0),
}


@section
def sanitizer(setting: Setting, *names: str) -> Checks:
    """Runs a trivial program under compute-sanitizer, then each of its tools."""
    tool = find_tool(SANITIZER)
    if setting.fake or tool is None:
        fake = "the fake GPU runs on the CPU; its launches are checked there"
        yield skipped(SANITIZER, fake if setting.fake else "it is not installed")
        return
    start = (tool, "--error-exitcode", str(FOUND_FAULTS))
    probe = (*start, *setting.python("-c", "import cupy; print(cupy.zeros(3).sum())"))
    skips = {"Device not supported": "it does not support this device"}
    tried = yield Check(f"{SANITIZER} itself", probe, PROBE_SECONDS, skips=skips)
    for name in names if tried.outcome == PASSED else ():
        keyword, seconds = SANITIZER_RUNS[name]
        words = setting.pytest("-k", keyword, "-p", "gpu_check.unpooled", OPS)
        yield Check(name, (*start, "--tool", name, *words), seconds)


sanitize = sanitizer(*SANITIZER_RUNS)


# -- PyTorch ---------------------------------------------------------------------------------------


@section
def of_torch(setting: Setting, name: str, program: str, seconds: float) -> Checks:
    """Calls a function of ``gpu_check`` that uses PyTorch, in its own process."""
    if setting.fake:
        yield skipped(name, "PyTorch does not know the fake GPU")
        return
    for check in function(name, program, seconds)(setting):
        assert isinstance(check, Check)
        yield needing("torch", check)
