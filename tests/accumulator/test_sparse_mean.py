"""``sparse_mean``: rows divided by their own count, or by the number of gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.exact_data import FLOATS, exact_data, same

import gradreduce as gr
from gradreduce.device import accumulate_dtype

SHAPE = (12, 3)


def gradient(seed, dtype):
    """Rows in any order, some of them twice; none for every fourth seed."""
    indices = np.random.default_rng(seed).integers(0, SHAPE[0], seed % 4 * 2)
    return gr.IndexedSlices(exact_data((indices.size, 3), dtype, seed=seed), indices, SHAPE)


def first(taken):
    """The IndexedSlices of the first device; those of the others have the same bits."""
    parts = taken.values if isinstance(taken, gr.Mirrored) else (taken,)
    for part in parts[1:]:
        assert same(part.indices, parts[0].indices)
        assert same(part.values, parts[0].values)
    return parts[0]


def of_replicas(home, seeds, dtype):
    """A gradient for each replica of a mesh, or the first one alone."""
    grads = [gradient(seed, dtype) for seed in seeds]
    return gr.PerReplica(grads, home) if isinstance(home, gr.Mesh) else grads[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_calls", [1, 3])
def test_per_gradient_is_the_mean_of_the_dense_gradients(home, dtype, num_calls):
    """Each replica of a PerReplica is one gradient, also one without rows."""
    make = partial(gr.SparseConditionalAccumulator, dtype, SHAPE, device=home)
    mean, total = make(sparse_mean="per_gradient"), make(reduction_type="SUM")
    size = len(home) if isinstance(home, gr.Mesh) else 1
    dense, count, wide = np.zeros(SHAPE), num_calls * size + 1, accumulate_dtype(dtype)
    for call in range(num_calls):
        seeds = range(call * size, (call + 1) * size)
        for acc in (mean, total):
            acc.apply_indexed_slices_grad(of_replicas(home, seeds, dtype))
        for seed in seeds:
            slices = gradient(seed, dtype)
            np.add.at(dense, slices.indices, slices.values.astype("float64"))
    single = gradient(7, dtype)  # from one replica alone
    np.add.at(dense, single.indices, single.values.astype("float64"))
    for acc in (mean, total):
        acc.apply_indexed_slices_grad(single)
        assert acc.num_accumulated() == count
    taken, summed = (first(acc.take_indexed_slices_grad(1)) for acc in (mean, total))
    assert same(taken.indices, summed.indices)
    wanted = (dense.astype(wide) / wide.type(count)).astype(dtype)  # x / n, rounded once
    assert (taken.values == wanted[taken.indices]).all()
    assert (taken.to_dense(output_type="numpy") == wanted).all()


def test_a_joint_take_divides_each_by_its_own_rule(home):
    """Three sparse accumulators and a dense one; the launches are those of per_row alone."""

    def make(**options):
        return gr.SparseConditionalAccumulator("float32", (9, 1), device=home, **options)

    kinds = ["per_row", "per_gradient", "per_row"]
    found = []
    for each in (kinds, ["per_row"] * 3):
        accumulators = [make(sparse_mean=kind) for kind in each]
        accumulators.append(gr.ConditionalAccumulator("float32", (1,), device=home))
        mesh = accumulators[0].accumulator_ref.devices[0].mesh
        with mesh.journal() as journal:
            for rows in ([1, 4], [4]):
                values = np.full((len(rows), 1), 6.0, "float32")
                grads = [gr.IndexedSlices(values, rows)] * 3
                assert gr.apply_grads(accumulators, [*grads, np.array([6.0], "float32")])
            *taken, dense = gr.take_grads(accumulators, 2, output_type="numpy")
        found.append((journal.launches, journal.copies, journal.uploads, journal.syncs))
        for kind, slices in zip(each, map(first, taken), strict=True):
            wanted = [6.0, 6.0] if kind == "per_row" else [3.0, 6.0]
            assert slices.values.ravel().tolist() == wanted
        assert np.asarray(getattr(dense, "primary", dense)).tolist() == [6.0]
    assert found[0] == found[1]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["per row", "PER_ROW", "", None, 1])
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_another_sparse_mean_is_an_error(device, wrong, reduction_type):
    with pytest.raises(ValueError) as error:
        gr.SparseConditionalAccumulator(
            "float32", reduction_type=reduction_type, device=device, sparse_mean=wrong
        )
    assert str(error.value) == f'sparse_mean {wrong!r} not in: "per_row", "per_gradient"'


def test_a_sum_has_no_divisor(device):
    def make(sparse_mean):
        return gr.SparseConditionalAccumulator(
            "float32", None, "summed", reduction_type="SUM", device=device, sparse_mean=sparse_mean
        )

    with pytest.raises(ValueError) as error:
        make("per_gradient")
    assert str(error.value) == (
        "sparse_mean='per_gradient' is only for reduction_type='MEAN'; a SUM is not divided"
    )
    with make("per_row") as acc:  # the name is free, and the default may be passed
        acc.apply_grad([1], [[2.0]])
        acc.apply_grad([1], [[4.0]])
        assert acc.take_grad(2)[1].tolist() == [[6.0]]
