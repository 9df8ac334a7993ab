"""reduce and batch_reduce: parts of a mesh, memory of many calls, and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.exact_data import random_data
from support.meshes import check_mirrored, expected_of, num_grown, per_replica, placement_of
from support.threads import in_threads

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
BATCH = [((40, 500), "float32"), ((), "float16"), ((0, 4), "float32"), ((2, 2), "complex64"),
         ((9,), "float64"), ((4,), "float16"), ((), "float32")]  # fmt: skip


def random_arrays(count, seed=0):
    """``[tensor][replica]``."""
    return [
        [random_data(shape, dtype, seed=seed + 100 * place + replica) for replica in range(count)]
        for place, (shape, dtype) in enumerate(BATCH)
    ]


def pairs(values):
    return [(value, value) for value in values]


def test_values_of_several_parts_of_a_mesh_in_one_batch(numpy_mesh):
    count = len(numpy_mesh)
    parts = [numpy_mesh[:1], numpy_mesh, numpy_mesh[-1:], numpy_mesh[count // 2 :]]
    values = [per_replica(part, lambda replica: np.ones(2, np.float32)) for part in parts]
    for algorithm in ALGORITHMS:
        results = gr.AllReduceCrossDeviceOps(algorithm).batch_reduce(SUM, pairs(values))
        for part, result in zip(parts, results, strict=True):
            assert result.devices == part.devices
            check_mirrored(result, np.full(2, len(part), np.float32))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_packs", [0, 2])
def test_a_steady_state_grows_no_pool(numpy_mesh, num_packs, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, num_packs)
    values = [gr.PerReplica(replicas, numpy_mesh) for replicas in random_arrays(len(numpy_mesh))]
    for turn in range(9):
        if turn == 3:
            grown = num_grown(numpy_mesh)
        kept = ops.batch_reduce(MEAN, pairs(values))  # results stay valid during the next call
    assert num_grown(numpy_mesh) == grown
    assert len(kept) == len(values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_share_a_mesh(numpy_mesh, algorithm):
    ops, count = gr.AllReduceCrossDeviceOps(algorithm, 2), len(numpy_mesh)
    together = threading.Barrier(4, timeout=60)

    def work(seed):
        arrays = random_arrays(count, 10_000 * seed)
        values = [gr.PerReplica(replicas, numpy_mesh) for replicas in arrays]
        sums = [expected_of(algorithm, each, placement_of(numpy_mesh), count) for each in arrays]
        together.wait()
        for _ in range(5):
            for result, wanted in zip(ops.batch_reduce(MEAN, pairs(values)), sums, strict=True):
                check_mirrored(result, wanted)

    in_threads(*[lambda seed=seed: work(seed) for seed in range(4)])
