"""Every detector fires: faults planted in our own source are found, and by the right words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cupy.planted import FAULTS

import gradreduce

pytestmark = pytest.mark.fake_cupy


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    folders = [Path(__file__).parent.parent, Path(gradreduce.__file__).parent.parent]
    done = subprocess.run(
        [sys.executable, "-m", "fake_cupy.mutants"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(outcomes, name):
    assert outcomes[name].startswith("seed"), outcomes[name]
    # With a queue stuck, what a fault lets free or wait for memory may be met first: threads race.
    also = "would hang" if FAULTS[name].hangs else FAULTS[name].says
    assert FAULTS[name].says in outcomes[name] or also in outcomes[name]
