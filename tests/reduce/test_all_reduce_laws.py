"""Properties of reduce and batch_reduce for any batch, dtype, packing and placement.

They hold bit by bit, also for nccl: the simulated collective adds in mesh order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import meshes
from support.exact_data import DTYPES, random_data, same
from support.exhaustive import examples
from support.implementations import accumulate_dtype_of
from support.meshes import MeshCase

import gradreduce as gr
from gradreduce.device import mean_dtype
from gradreduce.reduce.algorithms import ALGORITHMS

pytestmark = pytest.mark.filterwarnings("ignore:agg_small_grads")  # with packs
SUM, MEAN = gr.ReduceOp.SUM, gr.ReduceOp.MEAN
LAWS = settings(deadline=None, max_examples=examples(80))

NAMES = st.sampled_from(list(ALGORITHMS))
OPS = st.sampled_from([SUM, MEAN])
SHAPES = st.one_of(
    st.just(()), st.tuples(st.integers(0, 40)), st.just((70, 300)),
    st.tuples(st.integers(0, 5), st.integers(1, 7)),
)  # fmt: skip
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8)
SMALL = st.sampled_from([(0, 10), (16, 2), (100, 3), (10**6, 10)])
PACKINGS = st.tuples(st.sampled_from([0, 0, 1, 2, 3, 50]), SMALL).map(lambda p: (p[0], *p[1]))


def cases(placements=(*meshes.PLACEMENTS, (0, 1), (0, 1, 2, 3), (1, 0, 1))):
    return st.tuples(st.sampled_from(placements), st.booleans()).map(lambda of: MeshCase(*of))


@dataclass(frozen=True)
class Batch:
    """Tensors of random data.

    Attributes:
        tensors: shape and dtype of each.
        seed: of the data; that of a tensor depends on its place too.
    """

    tensors: list[tuple[tuple[int, ...], np.dtype]]
    seed: int

    def arrays(self, num_replicas: int) -> list[list[np.ndarray]]:
        """``[tensor][replica]``."""
        return [
            [random_data(shape, dtype, seed=self.seed + 100 * place + replica)
             for replica in range(num_replicas)]
            for place, (shape, dtype) in enumerate(self.tensors)
        ]  # fmt: skip


BATCHES = st.builds(Batch, TENSORS, st.integers(0, 10**6))


def reduced(mesh, columns, op, algorithm="hierarchical_copy", packing=(1,)):
    """``[tensor][replica]`` of one ``batch_reduce``."""
    ops = gr.AllReduceCrossDeviceOps(algorithm, *packing)
    values = [gr.PerReplica(column, mesh) for column in columns]
    return [result.values for result in ops.batch_reduce(op, [(v, v) for v in values])]


def equal(left, right) -> bool:
    return all(
        len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def widened(columns):
    """Casts each array to its accumulate type."""
    return [
        [array.astype(accumulate_dtype_of(array.dtype)) for array in column] for column in columns
    ]


def quotients(sums, divisor, dtypes):
    """Divides each sum in the dtype of its mean."""
    with np.errstate(all="ignore"):
        return [
            [_quotient(array, divisor).astype(dtype) for array in column]
            for column, dtype in zip(sums, dtypes, strict=True)
        ]


def _quotient(array, divisor):
    if array.dtype.kind == "c":  # real and imaginary parts separately
        parts = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
        return (parts / parts.dtype.type(divisor)).view(array.dtype).reshape(array.shape)
    wide = mean_dtype(array.dtype)
    return array.astype(wide) / wide.type(divisor)


@LAWS
@given(cases(), BATCHES, PACKINGS, OPS, NAMES)
def test_a_batch_is_its_values_one_by_one(case, batch, packing, op, algorithm):
    with case.open() as mesh:
        columns = batch.arrays(len(mesh))
        together = reduced(mesh, columns, op, algorithm, packing)
        alone = [reduced(mesh, [column], op, algorithm, packing)[0] for column in columns]
        assert equal(together, alone)


@LAWS
@given(cases(), BATCHES, PACKINGS, PACKINGS, OPS, NAMES)
def test_any_packing_is_no_packing(case, batch, packing, other, op, algorithm):
    with case.open() as mesh:
        columns = batch.arrays(len(mesh))
        none, *found = [
            reduced(mesh, columns, op, algorithm, way) for way in ((0,), packing, other)
        ]
        assert all(equal(none, each) for each in found)


@LAWS
@given(cases(), BATCHES, PACKINGS, st.randoms(use_true_random=False), OPS, NAMES)
def test_permuting_the_batch_permutes_the_results(case, batch, packing, random, op, algorithm):
    order = list(range(len(batch.tensors)))
    random.shuffle(order)
    with case.open() as mesh:
        columns = batch.arrays(len(mesh))
        straight = reduced(mesh, columns, op, algorithm, packing)
        turned = [columns[place] for place in order]
        permuted = reduced(mesh, turned, op, algorithm, packing)
        assert equal(permuted, [straight[place] for place in order])


@LAWS
@given(cases(), BATCHES, PACKINGS)
def test_the_mean_is_the_sum_in_the_accumulate_type_divided_and_rounded_once(case, batch, packing):
    """Sums of float16 in float32: the same gradients, passed as float32."""
    with case.open() as mesh:
        columns = batch.arrays(len(mesh))
        sums = reduced(mesh, widened(columns), SUM, packing=packing)
        means = reduced(mesh, columns, MEAN, packing=packing)
        dtypes = [mean_dtype(dtype) for _, dtype in batch.tensors]
        assert equal(means, quotients(sums, len(mesh), dtypes))


@LAWS
@given(cases(), BATCHES, PACKINGS)
def test_the_mean_by_nccl_is_what_it_summed_divided(case, batch, packing):
    """NCCL rounds its sums. With one physical device it is not called."""
    with case.open() as mesh:
        columns = batch.arrays(len(mesh))
        rounds = len(mesh.by_physical) > 1
        sums = reduced(mesh, columns if rounds else widened(columns), SUM, "nccl", packing)
        dtypes = [mean_dtype(dtype) for _, dtype in batch.tensors]
        means = reduced(mesh, columns, MEAN, "nccl", packing)
        assert equal(means, quotients(widened(sums), len(mesh), dtypes))


def placements_of_one_number():
    """Two ways to put the same number of replicas on up to nine physical devices."""

    def ways(number):
        places = st.lists(st.integers(0, 8), min_size=number, max_size=number).map(tuple)
        return st.tuples(places, places)

    return st.integers(1, 9).flatmap(ways)


@LAWS
@given(placements_of_one_number(), st.booleans(), BATCHES, PACKINGS, PACKINGS, OPS)
def test_every_placement_gives_the_same_bits(placements, peer_access, batch, packing, other, op):
    found = []
    for placement, way in zip(placements, (packing, other), strict=True):
        with MeshCase(placement, peer_access).open() as mesh:
            found.append(reduced(mesh, batch.arrays(len(mesh)), op, packing=way))
        peer_access = not peer_access
    assert equal(*found)
