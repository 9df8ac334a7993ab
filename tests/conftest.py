"""Settings for all tests.

This file loads the plugins of ``support/``: the rules for skips (``skip_rules.py``), background
processes (``background_runs.py``), the cases that a plain run leaves out (``exhaustive.py``), GPUs
(``gpus.py``) and the cluster for tests that need Ray (``ray_cluster.py``). It also reduces memory
use and the time of garbage collections.
"""

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
TESTS = Path(__file__).resolve().parent
EXAMPLES = (TESTS / "examples", TESTS / "project" / "test_readme.py")
# As plugins, not imports: pytest then finds their options and their hooks by itself.
pytest_plugins = (
    "support.skip_rules",
    "support.background_runs",
    "support.exhaustive",
    "support.gpus",
    "support.ray_cluster",
)


def pytest_configure() -> None:
    """Lets tests interrupt this process and its children; sets up the allocator, and JAX.

    If a shell starts the process with ``&``, SIGINT is ignored in it, and Python does not change
    that. JAX reads its environment variables when it is imported.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of large arrays, each has its own mapping, which is returned to the system when it is freed.
    # By default the C library soon puts them into its heap, where small objects keep them.
    tune = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if tune is not None:
        tune(M_MMAP_THRESHOLD, 1 << 18)
    # On a machine with GPUs the plain tests use simulated devices, and JAX's the CPU; JAX allocates
    # only what it uses. JAX's CPU has four devices.
    os.environ.setdefault("GRADREDUCE_BACKEND", "sim")
    os.environ.setdefault("JAX_DEFAULT_DEVICE", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the tests of the examples to a separate process, unless a path names them.

    See ``project/test_examples.py``.
    """
    if collection_path not in EXAMPLES:
        return None
    named = (Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args)
    return None if any(collection_path in (path, *path.parents) for path in named) else True


@pytest.fixture(autouse=True, scope="session")
def small_copies() -> Iterator[None]:
    """Makes ``profile`` measure copies of 1 MiB instead of 64, to save memory and time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradreduce.reduce.profile.HOST_BYTES", 1 << 20)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes pytest's own objects from garbage collection.

    They exist until the end of the run. Each ``gc.collect()`` of a test would search all of them,
    which takes a third of a second with the whole suite. Objects of tests are collected as usual.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Iterator[None]:
    """Returns freed memory to the system after a file's tests; excludes the rest from collections.

    The C library keeps freed memory for each thread that allocated some: half a gigabyte in a whole
    run. The rest are pytest's reports, tens of objects per test, and meshes that several files use.
    After the tests of a folder such meshes are garbage, so that all objects are searched.
    """
    made = yield
    if nextitem is None or nextitem.path != item.path:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
    return made
