"""Tests of the CUDA backend: on real GPUs, and on the fake CuPy in a separate pytest process.

Bodies for both are marked by the GPUs that they need, as everywhere; in a run without a GPU they
skip. What looks into the fake, or needs a machine that is not there, is marked ``fake_cupy``:
``PYTHONPATH=tests python -m pytest -p fake_cupy.plugin tests/backends/cuda``.
``tests/project/test_fake_cupy.py`` starts that process from the plain test command.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.gpus import FAKE

from gradreduce.backends import open_mesh
from gradreduce.device import Mesh

# Files that import CuPy, or the fake, when they are collected.
NEEDS_CUPY = re.compile(
    r"^(import cupy|from (fake_cupy|gradreduce\.backends\.cuda|backends\.cuda)\b)", re.MULTILINE
)
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if not FAKE and NEEDS_CUPY.search(path.read_text(encoding="utf-8"))
]


@pytest.fixture
def cupy() -> ModuleType:
    """The real CuPy or the fake; not imported if neither is available."""
    return importlib.import_module("cupy")


@pytest.fixture(params=range(4))
def here(request, gpus) -> Any:
    """Three GPUs; on the fake, its machine with another order for each seed."""
    return gpus(request.param, num_gpus=3)


@pytest.fixture
def mesh(here) -> Iterator[Mesh]:
    with open_mesh([0, 0, 1], backend="cuda") as made:
        yield made
