"""Section ``first``: the first checks on a machine with a GPU, in short steps.

Each step tests what the next one relies on: sums mean nothing if CuPy raises warnings, and times
mean nothing if sums are wrong. Each check has its own deadline. The deadlines of a step add up to
less than the limit of a section, so that no check uses the time of another.
"""

from __future__ import annotations

from collections.abc import Mapping

from .section import Checks, Section, function
from .sections import (
    OPS,
    apart,
    file,
    nccl_version,
    of_torch,
    one_rank,
    sanitizer,
    script,
)
from .setting import Setting

DEVICE, CUDA = "tests/device/test_contract", "tests/backends/cuda/test_"
# Every warning is an error, those of the imports too.
STRICT = {"PYTHONWARNINGS": "error"}

# step -> its checks, in their order
FIRST: Mapping[str, tuple[Section, ...]] = {
    "1-versions": (
        function("versions", "programs:versions", 60),
        function("put, add and numpy; warnings are errors", "programs:add", 90, **STRICT),
    ),
    "2-kernels": (
        function("every kernel compiled", "programs:compile_kernels", 100),
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
        file("tests/end_to_end/test_legal_orders.py", 110),
        file(f"{CUDA}capture.py", 50),
        file(f"{CUDA}capture_conflicts.py", 70),
    ),
    "4-faults": (
        file(f"{CUDA}out_of_memory.py", 150),
        of_torch("a failed assertion of PyTorch", "torch_assert:said", 120),
    ),
    "5-host-time": (
        function("host time of single calls", "host_costs:measured", 100),
        function("queries and dropped steps, on a busy GPU", "busy_gpu:measured", 60),
    ),
    "6-benchmarks": (
        function("copy rate", "programs:copy_rate", 40),
        script("bench_ops.py", 220),
        script("bench_all_reduce.py", 220),
    ),
    "7-libraries": (
        nccl_version,
        one_rank,
        apart,
        file(f"{CUDA}jax.py", 70),
        of_torch("training by PyTorch", "torch_training:trained", 50),
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
