"""No legal order of the queues changes a bit: of the simulation, of GPUs, and of the fake CuPy.

Seed 0 runs work as late as the host allows, seed 1 as early, others in random orders. The fake
also reports each use of memory that no wait orders.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from support.exact_data import same
from support.exhaustive import seeds
from support.gpus import FAKE
from support.mesh_programs import PROGRAMS

import gradreduce as gr
from gradreduce import ops
from gradreduce.backends.sim.scheduler import RandomScheduler

ISLANDS = frozenset({(0, 1), (1, 0), (2, 3), (3, 2)})
# Physical devices, and which of them access each other's memory.
CASES = [
    ([0, 0, 0], True),
    *product(([0, 1], [0, 0, 1, 1], [0, 1, 1, 2], [0, 1, 1, 2, 0]), (True, False)),
    ([0, 1], {(0, 1)}),
    ([0, 2, 1], ISLANDS),
    ([0, 1, 1, 2, 0], ISLANDS),
]
SEEDS = (0, 5) if FAKE else (0,)
ON_GPUS = [
    pytest.param([0, 0, 0], True, marks=pytest.mark.gpu, id="one GPU"),
    pytest.param([0, 0, 1, 1], True, marks=pytest.mark.multi_gpu(2), id="two GPUs"),
    pytest.param([0, 1, 1, 2, 0], True, marks=pytest.mark.multi_gpu(3), id="three GPUs"),
    pytest.param([0, 1, 1, 2, 0], False, marks=pytest.mark.fake_cupy, id="no peer access"),
]
# Real NCCL promises no order of additions; it is not called for one GPU.
BY_NCCL = [
    ON_GPUS[0],
    pytest.param([0, 0, 1, 1], True, marks=pytest.mark.fake_cupy, id="two GPUs"),
    ON_GPUS[-1],
]


def bits(name: str, placement: Sequence[int], peers: object, seed: int | None) -> list[np.ndarray]:
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peers, schedule_seed=seed
    ) as mesh:
        return PROGRAMS[name](mesh)


@pytest.mark.parametrize("turns", seeds(len(CASES) + 6, 8 * len(CASES)))
@pytest.mark.parametrize("name", PROGRAMS)
def test_simulated_queues(name, turns):
    """The bits do not depend on which GPUs access each other's memory, either."""
    placements = {tuple(placement) for placement, _ in CASES}
    expected = {placement: bits(name, placement, True, None) for placement in placements}
    for turn in turns:
        placement, peers = CASES[5 * turn % len(CASES)]  # each, then others than neighbors
        seed = 0 if turn < len(CASES) else turn
        wanted, found = expected[tuple(placement)], bits(name, placement, peers, seed)
        assert len(found) == len(wanted)
        assert all(map(same, found, wanted)), (seed, placement, peers)


def check_on_gpus(name, placement, peers, gpus) -> None:
    wanted = bits(name, placement, peers, None)
    for seed in SEEDS:
        gpus(seed, peers=peers)
        with gr.open_mesh(placement, backend="cuda") as mesh:
            found = PROGRAMS[name](mesh)
        assert len(found) == len(wanted)
        assert all(map(same, found, wanted)), seed


@pytest.mark.parametrize(("placement", "peers"), ON_GPUS)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "nccl" not in name])
def test_cuda_streams(name, placement, peers, gpus):
    check_on_gpus(name, placement, peers, gpus)


@pytest.mark.parametrize(("placement", "peers"), BY_NCCL)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "nccl" in name])
def test_cuda_streams_and_nccl(name, placement, peers, gpus):
    check_on_gpus(name, placement, peers, gpus)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_transfer_queue_writes_is_read_after_it(seed):
    with gr.open_mesh([0], backend="sim", strict=True, schedule_seed=seed) as mesh:
        (device,) = mesh
        term, copied, total = (
            device.upload(np.ones(9)),
            *(device.zeros((9,), "float64") for _ in "ab"),
        )
        device.copy(copied, term, queue="transfer")
        assert (gr.add_n([term, copied]).numpy() == 2).all()
        ops.add_n([total], [[copied, copied]], queue="transfer")
        assert (total.numpy() == 2).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_host_writes_an_array_after_another_gpu_has_read_it(seed):
    with gr.open_mesh([0, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        array, copied = np.ones(9), mesh[1].empty((9,), "float64")
        mesh[1].copy(copied, mesh[0].adopt(array), queue="transfer")
        mesh[0].block_stream(None)  # as each public call does for its inputs
        array[...] = 2
        assert (copied.numpy() == 1).all()


def test_a_wait_that_cannot_end_raises_instead_of_hanging():
    scheduler = RandomScheduler(3)
    other = RandomScheduler(0)
    scheduler.wait("a", other.record("b"))
    scheduler.submit("a", lambda: None)
    with pytest.raises(RuntimeError, match="deadlock: a waits"):
        scheduler.finish("a")
