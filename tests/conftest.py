"""What every test shares.

The law of skips (``skips.py``), processes that begin before their tests (``early.py``), the cases
that a plain run leaves out (``exhaustive.py``), little memory, and a heap that is quick to search.
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
pytest_plugins = ("support.skip_rules", "support.background_runs", "support.exhaustive")


def pytest_configure() -> None:
    """Lets tests interrupt this process and its children, also where a shell runs it with &.

    Such a shell ignores SIGINT in what it starts, and Python then leaves it ignored. And says what
    JAX reads of its environment when it is imported.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where JAX has GPUs: its plain tests stay on the CPU, and it takes only the memory it uses.
    os.environ.setdefault("JAX_DEFAULT_DEVICE", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the tests of the examples to a process of their own, unless a path names them.

    See ``test_examples.py``.
    """
    if collection_path not in EXAMPLES:
        return None
    named = (Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args)
    return None if any(collection_path in (path, *path.parents) for path in named) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps what pytest holds of every test out of the garbage collector's sight.

    It lives as long as the run, and each ``gc.collect()`` of a test would search all of it: a third
    of a second with the whole suite. What tests make is found as ever.
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
    """Gives memory that a file's tests have freed back to the system.

    The C library keeps it for each thread that has asked for some: half a gigabyte in a whole run.
    """
    made = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
    return made
