"""Actors and workers on two nodes, one of which is killed; see ``nodes_program.py``."""

from pathlib import Path

import pytest
from support import processes

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("nodes_program.py")


@pytest.mark.parametrize(
    "scenario",
    [
        "exchange",
        "worker_ends",
        "second_shard_ends",
        "first_shard_ends",
        "all_shards_end",
        "without_snapshots",
    ],
)
def test_two_nodes(tmp_path, scenario):
    done = processes.run("none", 1, str(PROGRAM), scenario, str(tmp_path))
    assert done.returncode == 0, done.text
