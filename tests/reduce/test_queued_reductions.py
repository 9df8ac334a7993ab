"""Every kind of reduction with queued work: no valid order changes a bit.

Seed 0 runs work as late as possible, seed 1 as early as possible, others in random orders.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from support.exhaustive import seeds
from support.reduction_calls import data, dense, everything

import gradreduce as gr
from gradreduce import ops
from gradreduce.reduce.algorithms import ALGORITHMS

ISLANDS = frozenset({(0, 1), (1, 0), (2, 3), (3, 2)})
CASES = [
    *itertools.product(([0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 0]), (True, False)),
    ([0, 1, 1, 2, 0], ISLANDS),
]


def bits(seed, algorithm, placement, peer_access):
    with gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peer_access, schedule_seed=seed
    ) as mesh:
        return [array.tobytes() for array in everything(mesh, algorithm, rounds=1)]


@pytest.mark.parametrize("seeds", seeds(2 * len(CASES), 84))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_reduction_has_the_same_bits_in_every_legal_order(algorithm, seeds):
    expected = {place: bits(None, algorithm, *case) for place, case in enumerate(CASES)}
    for seed in seeds:
        place = seed % len(CASES)
        assert bits(seed, algorithm, *CASES[place]) == expected[place], (seed, CASES[place])


def spread(seed):
    """A broadcast from a device whose GPU's first device has not been read before."""
    with gr.open_mesh([0, 0, 1, 1], backend="sim", strict=True, schedule_seed=seed) as mesh:
        source = mesh.devices[0].upload(data((5, 3), "float32", 1))
        result = gr.NcclAllReduce().broadcast(source, mesh)
        return [part.numpy().tobytes() for part in result.parts[::-1]]


def added(seed):
    with gr.open_mesh([0, 0], backend="sim", strict=True, schedule_seed=seed) as mesh:
        value = dense(mesh, (40, 7), "float32", 1)
        (part,) = gr.ReductionToOneDevice().reduce(gr.ReduceOp.MEAN, value, "sim:0").parts
        return part.numpy().tobytes()


def opened(placement, seed, peers=True):
    return gr.open_mesh(
        placement, backend="sim", strict=True, peer_access=peers, schedule_seed=seed
    )


def overwritten(buffers):
    for buffer in buffers:
        buffer.device.upload(np.full(buffer.shape, 9, buffer.dtype), out=buffer)


def read_by_a_peer(use, seed):
    """Overwrites memory of a peer while the launch that reads it is queued."""
    with opened([0, 1], seed) as mesh:
        value = dense(mesh, (40, 7), "float32", 1)
        made = use(mesh, value)
        overwritten(value.buffers[::-1])
        return made.numpy().tobytes()


def sum_of(mesh, value):
    return gr.ReductionToOneDevice().reduce(gr.ReduceOp.MEAN, value, "sim:0").primary


def rows_of(mesh, value):
    tables = gr.PerReplica([gr.IndexedSlices(buffer, [1] * 40) for buffer in value.buffers])
    return gr.ReductionToOneDevice().reduce(gr.ReduceOp.SUM, tables, "sim:0").primary.values


def terms_of(mesh, value):
    return gr.add_n(value.buffers)


def partial_sums_of(mesh, value):
    return gr.add_n([*value.buffers, *value.buffers])


def gradient_of(mesh, value):
    accumulator = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
    accumulator.apply_grad(value.buffers[1])
    return accumulator.accumulator_ref.totals[0]


SCENARIOS = {
    "added": added,
    "spread": spread,
    **{use.__name__: partial(read_by_a_peer, use)
       for use in (sum_of, rows_of, terms_of, partial_sums_of, gradient_of)},
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_scenario_has_the_same_bits_in_every_legal_order(scenario):
    expected = scenario(None)
    assert all(scenario(seed) == expected for seed in range(48))


@pytest.mark.parametrize("seed", range(6))
def test_what_the_transfer_queue_writes_is_read_after_it(seed):
    with opened([0], seed) as mesh:
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
    with opened([0, 1], seed) as mesh:
        array, copied = np.ones(9), mesh[1].empty((9,), "float64")
        mesh[1].copy(copied, mesh[0].adopt(array), queue="transfer")
        mesh[0].block_stream(None)  # as each public call does for its inputs
        array[...] = 2
        assert (copied.numpy() == 1).all()
