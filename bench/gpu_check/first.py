"""Section ``first``: the first checks on a machine with a GPU, in short steps.

Each step tests what the next one relies on: sums mean nothing if CuPy raises warnings, and times
mean nothing if sums are wrong. Each check has its own deadline. The deadlines of a step add up to
less than the limit of a section, so that no check uses the time of another.
"""

from functools import partial

from .counters import counters
from .section import Checks, function, needing, skipped
from .sections import (
    OPS,
    apart,
    file,
    nccl_version,
    of_torch,
    one_rank,
    over_processes,
    sanitizer,
    script,
)
from .setting import Setting

FIRST = ("1-versions", "2-kernels", "3-arrays", "4-faults", "5-host-time", "6-counters",
         "7-benchmarks", "8-libraries", "9-new")  # fmt: skip
DEVICE, CUDA = "tests/device/test_contract", "tests/backends/cuda/test_"


def first(setting: Setting) -> Checks:
    program, tests = partial(function, setting), partial(file, setting)
    # Every warning is an error, those of the imports too.
    strict = partial(program, PYTHONWARNINGS="error")
    steps = (
        (
            program("versions", "programs:versions", 90),
            strict("put, add and numpy; warnings are errors", "programs:add", 90),
        ),
        (
            # 421 templates. One core of an H100's machine took half a second for each (2026-11).
            program("every kernel compiled", "programs:compile_kernels", 180),
            tests(OPS, 45, "float32"),
            tests(OPS, 120),
            tests(f"{DEVICE}.py", 45),
            tests(f"{DEVICE}_launch.py", 45),
            tests(f"{DEVICE}_lifetime.py", 45),
        ),
        (
            tests("tests/arrays/test_convert_gpu.py", 90),
            tests(f"{CUDA}arrays.py", 60),
            tests(f"{CUDA}gradients.py", 100),
            tests("tests/end_to_end/test_legal_orders.py", 110),
            tests(f"{CUDA}capture.py", 50),
            tests(f"{CUDA}capture_conflicts.py", 70),
        ),
        (
            tests(f"{CUDA}out_of_memory.py", 150),
            of_torch(setting, "a failed assertion of PyTorch", "programs:assertion", 120),
        ),
        (
            program("host time of single calls", "programs:host_costs", 100),
            program("queries and dropped steps, on a busy GPU", "busy_gpu:measured", 60),
        ),
        (counters(setting, 150),),
        (
            program("copy rate", "programs:copy_rate", 40),
            script(setting, "bench_ops.py", 220),
            script(setting, "bench_all_reduce.py", 220),
        ),
        (
            nccl_version(setting),
            one_rank(setting),
            *apart(setting),
            tests(f"{CUDA}jax.py", 70),
            of_torch(setting, "training by PyTorch", "torch_training:trained", 50),
            sanitizer(setting, "memcheck"),
        ),
        (
            program("exact and weighted sums", "same_bits:compared", 90),
            over_processes(setting),
            skipped("PyTorch's group", "PyTorch does not know the fake GPU")
            if setting.fake
            else needing("torch", over_processes(setting, "torch")),
            of_torch(setting, "the backend of torch.distributed", "torch_backend:compared", 140),
        ),
    )
    for check in steps[FIRST.index(setting.part)]:  # noqa: UP028  # a tuple takes no results
        yield check


def step_of(word: str) -> str | None:
    """Returns the step with this number, this name, or both."""
    return next((step for step in FIRST if word in (step, *step.split("-", 1))), None)
