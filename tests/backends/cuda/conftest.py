"""Tests of the CUDA backend: on real GPUs, and on the fake CuPy in a separate pytest process.

The files in ``SHARED`` hold bodies for both, marked by the GPUs that they need, as everywhere; in
a run without a GPU they skip. What looks into the fake, or needs a machine that is not there, is
marked ``fake_cupy`` and collected only where the fake is in CuPy's place:
``PYTHONPATH=tests python -m pytest -p fake_cupy.plugin tests/backends/cuda``.
``tests/project/test_fake_cupy.py`` starts that process from the plain test command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = {
    f"test_{name}.py"
    for name in (
        "agn",
        "arrays",
        "capture",
        "capture_conflicts",
        "digits",
        "flows",
        "gradients",
        "jax",
        "ops",
        "optimizers",
        "out_of_memory",
        "prepared",
        "reductions",
        "segments",
        "sparse",
    )
}
FAKE = getattr(sys.modules.get("cupy"), "FAKE", False)
# The other files import the fake, or CuPy, when they are collected.
collect_ignore = [
    path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in SHARED
]
if FAKE:
    collect_ignore = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects cases of the shared files that only the fake can run."""
    if FAKE:
        return
    left_out = [item for item in items if item.get_closest_marker("fake_cupy")]
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
