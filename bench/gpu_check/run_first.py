"""Section ``first``: the first checks on a machine with a GPU, in short steps.

Each step tests what the next one relies on: sums mean nothing if CuPy raises warnings, and times
mean nothing if sums are wrong. Each check has its own deadline. The deadlines of a step add up to
less than the limit of a section, so that no check uses the time of another.
"""

from __future__ import annotations

from collections.abc import Mapping

from .run_bench import program, script
from .run_nccl import apart, one_rank, version
from .run_ncu import counters
from .run_sanitize import sanitizer
from .run_tests import file
from .section import Checks, Section, needing, skipped
from .setting import Setting

__all__ = ["FIRST", "first", "step_of"]

OPS, DEVICE, CUDA = (
    "tests/backends/cuda/test_ops.py",
    "tests/device/test_contract",
    "tests/backends/cuda/test_",
)
# Every warning is an error, those of the imports too.
STRICT = {"PYTHONWARNINGS": "error"}


def of_torch(name: str, module: str, seconds: float) -> Section:
    """Runs a module of ``gpu_check`` that uses PyTorch, in its own process."""

    def run(setting: Setting) -> Checks:
        if setting.fake:
            yield skipped(name, "PyTorch does not know the fake GPU")
        else:
            yield from needing("torch", program(name, module, seconds), name)(setting)

    return run


# step -> its checks, in their order
FIRST: Mapping[str, tuple[Section, ...]] = {
    "1-versions": (
        program("versions", "versions", 60),
        program("put, add and numpy; warnings are errors", "smoke", 90, **STRICT),
    ),
    "2-kernels": (
        program("every kernel compiled", "compile_kernels", 100),
        file(OPS, 60, "float32"),
        file(OPS, 140),
        file(f"{DEVICE}.py", 60),
        file(f"{DEVICE}_launch.py", 60),
        file(f"{DEVICE}_lifetime.py", 60),
    ),
    "3-arrays": (
        file("tests/arrays/test_convert_gpu.py", 90),
        file(f"{CUDA}arrays.py", 60),
        file(f"{CUDA}gradients.py", 100),
        file(f"{CUDA}flows.py", 60),
        file(f"{CUDA}capture.py", 50),
        file(f"{CUDA}capture_conflicts.py", 70),
        file(f"{CUDA}prepared.py", 50),
    ),
    "4-faults": (
        file(f"{CUDA}out_of_memory.py", 150),
        of_torch("a failed assertion of PyTorch", "torch_assert", 120),
    ),
    "5-host-time": (
        program("host time of single calls", "host_costs", 100),
        program("queries and dropped steps, on a busy GPU", "busy_gpu", 60),
    ),
    "6-counters": (counters(150),),
    "7-benchmarks": (
        program("copy rate", "copy_rate", 40),
        script("bench_ops.py", 220),
        script("bench_all_reduce.py", 220),
    ),
    "8-libraries": (
        version,
        one_rank,
        apart,
        file(f"{CUDA}jax.py", 70),
        of_torch("training by PyTorch", "torch_training", 50),
        sanitizer("memcheck"),
    ),
}


def first(setting: Setting) -> Checks:
    """Runs one step."""
    for section in FIRST[setting.part]:
        yield from section(setting)


def step_of(word: str) -> str | None:
    """Returns the step with this number, this name, or both."""
    return next((step for step in FIRST if word in (step, *step.split("-", 1))), None)
