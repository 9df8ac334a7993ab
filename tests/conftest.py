"""Settings for all tests.

Loads the plugins of ``support/``: the rules for skips (``skip_rules.py``), background processes
(``background_runs.py``), the cases that a plain run leaves out (``exhaustive.py``), the cluster of
tests that need Ray (``ray_cluster.py``). Also keeps memory use and the time of garbage collections
small.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
EXAMPLES = (TESTS / "examples", TESTS / "project" / "test_readme.py")
# As plugins, not imports: pytest then finds their options and their hooks by itself.
pytest_plugins = (
    "support.skip_rules",
    "support.background_runs",
    "support.exhaustive",
    "support.ray_cluster",
)


def pytest_configure() -> None:
    """Lets tests interrupt this process and its children, also if a shell runs it with &.

    Such a shell ignores SIGINT in what it starts, and Python then leaves it ignored. Also sets the
    environment variables that JAX reads when it is imported.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where JAX has GPUs: its plain tests stay on the CPU, and it takes only the memory it uses. The
    # CPU has four devices.
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes pytest's own objects from garbage collection.

    They live as long as the run, and each ``gc.collect()`` of a test would search all of them: a
    third of a second with the whole suite. Objects made by tests are collected as usual.
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
    """Returns memory freed by a file's tests to the system; excludes what is left from collections.

    The C library keeps it per thread that has allocated some: half a gigabyte in a whole run. What
    is left are pytest's reports, tens of objects per test.
    """
    made = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
    return made
