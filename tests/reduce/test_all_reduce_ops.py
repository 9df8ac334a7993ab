"""reduce and batch_reduce: the right values in the right order on every device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import meshes
from support.exact_data import random_data, same
from support.meshes import (
    check_mirrored,
    expected_of,
    num_grown,
    per_replica,
    placement_of,
)

import gradreduce as gr
from gradreduce.device import as_dtype
from gradreduce.reduce.algorithms import ALGORITHMS

numpy_mesh = meshes.numpy_mesh

SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN


BATCH = [
    ((3,), "float32"), ((), "float16"), ((0, 4), "float32"), ((5, 7), "bfloat16"),
    ((70,), "float32"), ((2, 2), "complex64"), ((9,), "float64"), ((4,), "float16"),
    ((), "float32"),
]  # fmt: skip


def random_batch(mesh, batch=BATCH, seed=0):
    """PerReplicas of random data, and the arrays in them."""
    arrays = [
        [random_data(shape, as_dtype(dtype), seed=seed + 100 * place + replica)
         for replica in range(len(mesh))]
        for place, (shape, dtype) in enumerate(batch)
    ]  # fmt: skip
    return [gr.PerReplica(replicas, mesh) for replicas in arrays], arrays


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
    values, _ = random_batch(numpy_mesh, [((40, 500), "float32"), *BATCH])
    kept = None
    for turn in range(23):
        if turn == 3:
            grown = num_grown(numpy_mesh)
        kept = ops.batch_reduce(MEAN, pairs(values))  # results stay valid during the next call
    assert num_grown(numpy_mesh) == grown
    assert len(kept) == len(values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_share_a_mesh(numpy_mesh, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm, 2)
    together, wrong = threading.Barrier(4, timeout=60), []

    def work(seed):
        values, arrays = random_batch(numpy_mesh, seed=10_000 * seed)
        wanted = [
            expected_of(algorithm, replicas, placement_of(numpy_mesh), len(numpy_mesh))
            for replicas in arrays
        ]
        together.wait()
        for _ in range(5):
            for result, array in zip(ops.batch_reduce(MEAN, pairs(values)), wanted, strict=True):
                wrong.extend(found for found in result.values if not same(found, array))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
