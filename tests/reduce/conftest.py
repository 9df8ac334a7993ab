"""Meshes and packs for tests of all-reduce algorithms."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.exact_data import random_data
from support.meshes import mesh, numpy_mesh, owned

from gradreduce.device import Mesh
from gradreduce.reduce.algorithm import Job

__all__ = ["make_jobs", "mesh", "numpy_mesh", "random_replicas"]


@pytest.fixture
def make_jobs():
    """``make_jobs(mesh, packs, divisor)``: a job for each ``packs[k][replica]``, on pool memory."""
    return _make_jobs


def _make_jobs(
    mesh: Mesh,
    packs: Sequence[Sequence[np.ndarray]],
    divisor: float = 1,
    *,
    in_place: bool = False,
    out_dtype: np.dtype | None = None,
) -> list[Job]:
    jobs = []
    for replicas in packs:
        inputs = tuple(owned(device, array) for device, array in zip(mesh, replicas, strict=True))
        outs = inputs
        if not in_place:
            outs = tuple(b.device.empty(b.shape, out_dtype or b.dtype) for b in inputs)
        jobs.append(Job(inputs, outs, divisor))
    return jobs


@pytest.fixture(scope="session")
def random_replicas():
    """``random_replicas(n, size, dtype)``: read-only data whose sums depend on the order."""
    made: dict[tuple, list[np.ndarray]] = {}

    def make(num_replicas: int, size: int, dtype) -> list[np.ndarray]:
        key = (num_replicas, size, np.dtype(dtype))
        if key not in made:
            seeds = range(num_replicas)
            made[key] = [random_data((size,), dtype, seed=1000 * size + seed) for seed in seeds]
            for array in made[key]:
                array.flags.writeable = False
        return made[key]

    return make
