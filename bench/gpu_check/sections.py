"""The sections of ``gpu_check``, whose checks ``first`` shares."""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from .section import Check, Checks, Result, function, needing, report_of, skipped
from .setting import ROOT, Setting, find_tool

# -- tests -----------------------------------------------------------------------------------------

OPS = "tests/backends/cuda/test_ops.py"
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
    found = yield collection(setting, "collection", *paths)
    total = sum(found.figures.values())
    for path, count in found.figures.items():
        yield run_file(setting, path, path, setting.limit * max(LEAST_SHARE, count / total))


def file(setting: Setting, path: str, seconds: float, keyword: str = "") -> Check | Result:
    """Runs a file of tests, or those of pytest's ``-k``; with the fake CuPy it only collects."""
    name = f"{path}, {keyword}" if keyword else path
    if setting.fake:
        return collection(setting, f"{name}, collected", "-k", keyword, path)
    return run_file(setting, name, path, seconds, "-k", keyword)


def run_file(setting: Setting, name: str, path: str, seconds: float, *words: str) -> Check | Result:
    library = LIBRARIES.get(path)
    required = () if library is None else (f"--require={library}",)
    check = Check(name, setting.pytest(*words, *required, path), seconds, read=summary_of)
    return check if library is None else needing(library, check)


def collection(setting: Setting, name: str, *words: str) -> Check:
    command = setting.pytest("-q", "--collect-only", *words)
    return Check(name, command, COLLECT_SECONDS, read=counts_of)


def counts_of(output: str) -> Mapping[str, int]:
    """Parses ``pytest -qq --collect-only``; returns the number of tests per file."""
    lines = re.findall(r"^(\S+\.py): (\d+)$", output, re.MULTILINE)
    return {path: int(count) for path, count in lines}


def summary_of(output: str) -> Mapping[str, Any]:
    """Parses the end of pytest's output; returns the number of tests per outcome."""
    *_, last = output.splitlines()
    totals = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", last)}
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {**totals, "names": names[:MOST_NAMES]}


# -- bench -----------------------------------------------------------------------------------------


def bench(setting: Setting) -> Checks:
    """Runs the copy rate, then every benchmark, with equal time limits."""
    chosen = setting.part or "bench_*.py"
    names = [path.name for path in sorted(setting.benches.glob(chosen))]
    seconds = setting.limit / (1 + len(names))
    yield function(setting, "copy rate", "programs:copy_rate", seconds)
    for name in names:
        yield script(setting, name, seconds)


def script(setting: Setting, name: str, seconds: float) -> Check:
    """Runs a benchmark, which takes ``--json FILE`` and ``--quick``."""
    report = setting.scratch(name)
    words = [str(setting.benches / name), "--json", str(report), *["--quick"] * setting.fake]
    return Check(name, setting.python(*words), seconds, read=report_of(report))


# -- example ---------------------------------------------------------------------------------------

NEEDED = ("sklearn", "matplotlib", "rich")
ALGORITHMS = ("hierarchical_copy", "nccl")
NUM_DEVICES = 8
STEPS, FAKE_STEPS = 150, 4  # 500, the example's own number, took an H100 over 40 s
BELOW_GOAL = 1  # the example's exit status when the accuracy is below its goal


def example(setting: Setting) -> Checks:
    """Trains the digits with each algorithm."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield skipped("the digits", f"not installed: {', '.join(missing)}")
        return
    passes = frozenset({0, BELOW_GOAL} if setting.fake else {0})  # so few steps reach no goal
    for algorithm in ALGORITHMS[:1] if setting.fake else ALGORITHMS:
        command = setting.python(
            str(ROOT / "examples" / "train_digits.py"), "--backend=cuda",
            f"--devices={NUM_DEVICES}", f"--placement={','.join('0' * NUM_DEVICES)}",
            f"--all-reduce={algorithm}", f"--steps={FAKE_STEPS if setting.fake else STEPS}",
            f"--output={setting.scratch(algorithm, '.png')}",
        )  # fmt: skip
        seconds = setting.limit / len(ALGORITHMS)
        yield Check(f"{algorithm} on cuda", command, seconds, read=table_of, passes=passes)


def table_of(output: str) -> Mapping[str, Any]:
    rows = dict(re.findall(r"^│\s*(\S.*?)\s*│\s*(\S.*?)\s*│$", output, re.MULTILINE))
    return {
        "accuracy": float(rows["test accuracy"]),
        "digest": rows["digest of the weights"],
        "steps_per_second": float(rows["steps/s"]),
        "launches_per_step": float(rows["launches per step"]),
    }


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
NO_OTHERS = "the fakes of two processes share nothing"


def nccl(setting: Setting) -> Checks:
    """Runs the checks that the installed NCCL version supports."""
    found = yield nccl_version(setting)
    yield one_rank(setting)
    installed = found.figures.get("version")
    for num_ranks in NUM_RANKS:
        name = f"one process, {num_ranks} ranks on one GPU"
        if (installed or 0) >= FIRST_TO_SHARE:
            yield ranks(setting, name, "together", num_ranks, **SHARED_GPU)
        else:
            yield skipped(name, f"NCCL {installed} is below {FIRST_TO_SHARE}")
    for num_ranks in NUM_RANKS[:1] if setting.fake else NUM_RANKS:
        for check in apart(setting, num_ranks):  # noqa: UP028  # a list takes no results
            yield check
    name = "a deadline ends an all-reduce that one rank does not join"
    hang = ranks(setting, name, "apart", 2, "hanging_rank")
    yield skipped(name, NO_OTHERS) if setting.fake else hang


def ranks(setting: Setting, name: str, way: str, *words: Any, **environment: str) -> Check:
    changed = {"NCCL_DEBUG": "WARN", **environment}
    return function(setting, name, f"ranks:{way}", RANKS_SECONDS, *words, **changed)


def nccl_version(setting: Setting) -> Check:
    return ranks(setting, "NCCL's version", "version")


def one_rank(setting: Setting) -> Check:
    return ranks(setting, "one process, 1 rank", "together", 1)


def apart(setting: Setting, num_ranks: int = 2) -> list[Check | Result]:
    """Runs a process for each rank; on the fake only one, which shows that the program works."""
    count = 1 if setting.fake else num_ranks
    name = f"a process for each of {count} rank{'s' * (count > 1)}"
    check = ranks(setting, name, "apart", count)
    return [check, skipped("a process for each rank", NO_OTHERS)] if setting.fake else [check]


def over_processes(setting: Setting, library: str = "ours") -> Check:
    """Runs two processes on one GPU; on the fake only one, which shows that the program works."""
    count = 1 if setting.fake else 2
    name = f"collectives of NCCL over {count} process{'es' * (count > 1)}, {library}"
    return function(setting, name, "processes:together", RANKS_SECONDS, count, library)


# -- sanitize --------------------------------------------------------------------------------------

# It slows a launch many times, so that only small sets of tests end in time. Our kernels have no
# shared memory and no barrier, so racecheck has little to find.
SANITIZER = "compute-sanitizer"
FOUND_FAULTS = "86"  # the exit status that we ask for, unlike any of pytest's
SANITIZER_SECONDS = 120.0
SANITIZER_RUNS = {  # tool -> which tests
    "memcheck": "float32 and (pack or add_n)",
    "initcheck": "float32 and add_n",
    "racecheck": "float32 and add_n",
}


def sanitizer(setting: Setting, name: str) -> Check | Result:
    """Runs tests under a tool of compute-sanitizer."""
    tool = find_tool(SANITIZER)
    if setting.fake or tool is None:
        fake = "the fake GPU runs on the CPU; its launches are checked there"
        return skipped(name, fake if setting.fake else f"{SANITIZER} is not installed")
    tests = setting.pytest("-k", SANITIZER_RUNS[name], "-p", "gpu_check.unpooled", OPS)
    command = (tool, "--error-exitcode", FOUND_FAULTS, "--tool", name, *tests)
    skips = {"Device not supported": "it does not support this device"}
    return Check(name, command, SANITIZER_SECONDS, skips=skips)


def sanitize(setting: Setting) -> Checks:
    for name in SANITIZER_RUNS:
        yield sanitizer(setting, name)


# -- PyTorch ---------------------------------------------------------------------------------------


def of_torch(setting: Setting, name: str, program: str, seconds: float) -> Check | Result:
    """Calls a function of ``gpu_check`` that uses PyTorch, in its own process."""
    if setting.fake:
        return skipped(name, "PyTorch does not know the fake GPU")
    return needing("torch", function(setting, name, program, seconds))
