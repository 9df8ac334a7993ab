"""The queued simulator over every kind of reduction: no legal order changes a bit.

Seed 0 runs as late as the host allows, seed 1 as early, the others mix.
"""

from __future__ import annotations

import itertools

import pytest
from scenes import data, dense, everything

import gradreduce as gr
from gradreduce import one_device
from gradreduce.allreduce import ALGORITHMS

CASES = list(itertools.product(([0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 0]), (True, False)))


def bits(seed, algorithm, placement, peer_access):
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peer_access, schedule_seed=seed
    ) as mesh:
        return [array.tobytes() for array in everything(mesh, algorithm, rounds=1)]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_reduction_has_the_same_bits_in_every_legal_order(algorithm):
    expected = {place: bits(None, algorithm, *case) for place, case in enumerate(CASES)}
    for seed in range(84):
        place = seed % len(CASES)
        assert bits(seed, algorithm, *CASES[place]) == expected[place], (seed, CASES[place])


def spread(seed):
    """A broadcast, read where no leader has been read before."""
    with gr.open_mesh([0, 0, 1, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        source = mesh.devices[0].upload(data((5, 3), "float32", 1))
        result = gr.NcclAllReduce().broadcast(source, mesh)
        return [part.numpy().tobytes() for part in result.parts[::-1]]


def added(seed):
    with gr.open_mesh([0, 0], backend="sim", strict=True, schedule_seed=seed) as mesh:
        value = dense(mesh, (40, 7), "float32", 1)
        (part,) = gr.ReductionToOneDevice().reduce(gr.ReduceOp.MEAN, value, "sim:0").parts
        return part.numpy().tobytes()


FAULTS = {
    "the sum does not wait for the replicas": ("gather", added),
    "nobody waits for who hands out": ("scatter", spread),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    name, scene = FAULTS[fault]
    expected = scene(None)
    assert all(scene(seed) == expected for seed in range(20))
    monkeypatch.setattr(one_device, name, lambda leader, others: None)
    assert any(scene(seed) != expected for seed in range(20))
