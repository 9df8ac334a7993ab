"""Tests of the CUDA backend's own code on the fake CuPy, in a pytest process of their own.

``PYTHONPATH=tests python -m pytest -p fake_cupy.plugin tests/cuda``; anywhere else nothing here is
collected. ``tests/test_fake_cupy.py`` starts that process from the plain test command.
"""

from __future__ import annotations

import sys

collect_ignore_glob = [] if getattr(sys.modules.get("cupy"), "FAKE", False) else ["test_*.py"]
