"""Fixtures: the implementations of a kernel, and processes that compile."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from support.implementations import ASKED, device, geometric_device, implementation

__all__ = ["device", "geometric_device", "implementation"]

# With their own builds, for any requested implementation; the plain run tests the others.
collect_ignore = ["test_one_template.py", "test_streamed.py", "test_traffic.py"] if ASKED else []


@pytest.fixture(scope="module")
def pool():
    """Processes that run NVRTC, which keeps a hundred megabytes."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as made:
        yield made
        made.shutdown(cancel_futures=True)
