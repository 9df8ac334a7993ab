"""Random programs: no false alarm, and the right values, whatever the order of the queues."""

from __future__ import annotations

import pytest
from fake_cupy import machine
from fake_cupy.programs import run

pytestmark = pytest.mark.fake_cupy

# 0 is fully lazy, 1 is eager. Some planted faults are found by one seed in fifty.
NUM_SEEDS, NUM_ALL_SEEDS = 56, 300


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_program_has_no_fault(seed):
    assert run(seed) > 0
    assert machine.current().faults == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS, NUM_ALL_SEEDS))
def test_no_other_program_has_one(seed):
    test_a_program_has_no_fault(seed)
