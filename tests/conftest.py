"""What every test shares.

The law of skips (``skips.py``), processes that begin before their tests (``early.py``), the cases
that a plain run leaves out (``exhaustive.py``), and a heap that is quick to search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

# As plugins, not imports: pytest then finds their options and their hooks by itself.
pytest_plugins = ("skips", "early", "exhaustive")


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
