"""A ``backward`` that fails ends its process by the user's error, while buckets are reduced."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import run

PROGRAM = Path(__file__).with_name("failing_backward.py")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("share", "times", "runs"),
    [(0, 1, 3), *[pytest.param(each, 5, 2, marks=pytest.mark.exhaustive) for each in range(1, 6)]],
)
@pytest.mark.parametrize("kind", ["DataParallel", "comm_hook"])
def test_an_error_in_backward_ends_the_process_by_its_traceback(
    kind: str,
    share: int,  # of 50 runs, which take longer than a test may
    times: int,
    runs: int,
) -> None:
    for _ in range(times):
        done = run("none", 1, str(PROGRAM), kind, str(runs))
        assert done.returncode == 0, done.text
        assert done.text.count("statuses 1 1") == runs, done.text
        assert done.text.count("ValueError: of the user's hook") == runs, done.text
