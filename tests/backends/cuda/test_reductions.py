"""Every kind of reduction across devices gives the simulation's bits on the CUDA backend."""

from __future__ import annotations

import pytest
from support.exact_data import same
from support.reduction_calls import everything

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

PLACEMENTS = [
    pytest.param([0], marks=pytest.mark.gpu, id="0"),
    pytest.param([0, 0, 0], marks=pytest.mark.gpu, id="000"),
    pytest.param([0, 0, 1, 1], marks=pytest.mark.multi_gpu(2), id="0011"),
    pytest.param([0, 1, 1, 2, 0], marks=pytest.mark.multi_gpu(3), id="01120"),
]


def check(placement, algorithm) -> None:
    with (
        gr.open_mesh(placement, backend="cuda") as mesh,
        gr.open_mesh(placement, backend="sim", strict=True) as sim,
    ):
        found, wanted = everything(mesh, algorithm), everything(sim, algorithm)
    assert len(found) == len(wanted)
    for place, pair in enumerate(zip(found, wanted, strict=True)):
        assert same(*pair), place


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_they_are_those_of_the_simulation(placement, gpus):
    gpus(len(placement))
    check(placement, "hierarchical_copy")


@pytest.mark.fake_cupy  # real NCCL promises no order of additions
@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1, 2, 0]], ids=str)
def test_over_nccl_too(placement, gpus):
    gpus(len(placement))
    check(placement, "nccl")


@pytest.mark.fake_cupy
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_peer_access_too(algorithm, gpus):
    gpus(5, peers=False)
    check([0, 1, 1, 2, 0], algorithm)
