"""GPUs for tests: real ones, or the fake CuPy's where it takes CuPy's place. A pytest plugin.

A test that needs GPUs is marked ``gpu`` or ``multi_gpu``, wherever it is. Without GPUs it is
skipped, and it runs in the separate process that has the fake CuPy
(``project/test_fake_cupy.py``). A test that only the fake can run is marked ``fake_cupy``; other
processes do not collect it.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what only the fake, or only the real libnccl, can run."""
    marker = "libnccl" if FAKE else "fake_cupy"
    left_out = [item for item in items if item.get_closest_marker(marker)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def gpus() -> Callable[..., Any]:
    """``gpus(seed, peers=…)`` begins a test; on the fake it makes a new machine.

    Real GPUs are what they are, whatever the seed.
    """
    if not FAKE:
        return lambda seed, **options: None
    from fake_cupy.plugin import fresh

    return fresh
