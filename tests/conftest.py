"""What every test shares.

The law of skips (``skips.py``), processes that begin before their tests (``early.py``), the cases
that a plain run leaves out (``exhaustive.py``), and a heap that is quick to search.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

# As plugins, not imports: pytest then finds their options and their hooks by itself.
pytest_plugins = ("skips", "early", "exhaustive")


def pytest_configure() -> None:
    """Lets tests interrupt this process and its children, also where a shell runs it with &.

    Such a shell ignores SIGINT in what it starts, and Python then leaves it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
