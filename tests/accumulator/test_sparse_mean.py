"""``sparse_mean``: rows divided by their own count, or by the number of gradients."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import Sparse, bits, contents, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.device import accumulate_dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_calls", [1, 3])
def test_per_gradient_is_the_sum_divided_by_the_number_of_gradients(home, dtype, num_calls):
    """Each replica of a PerReplica is one gradient, also one without rows; one rounding."""
    wide, size = accumulate_dtype(dtype), len(home) if isinstance(home, gr.Mesh) else 1
    mean = Sparse.make(dtype, (12, 3), device=home, sparse_mean="per_gradient")
    total = Sparse.make(wide, (12, 3), device=home, reduction_type="SUM")
    given = [Sparse.random(seed, dtype, (3,)) for seed in range(num_calls * size + 1)]
    given[0] = gr.IndexedSlices(np.empty((0, 3), dtype), [])
    for call in range(num_calls):
        grads = given[call * size : (call + 1) * size]
        spread = gr.PerReplica(grads, home) if isinstance(home, gr.Mesh) else grads[0]
        gr.apply_grads([mean, total], [spread] * 2, cast=True)
    gr.apply_grads([mean, total], [given[-1]] * 2, cast=True)  # from one replica alone
    assert mean.num_accumulated() == len(given)
    taken, summed = gr.take_grads([mean, total], 1, output_type="numpy")
    parts = [each.values if size > 1 else [each] for each in (taken, summed)]
    with np.errstate(all="ignore"):
        wanted = [
            mapped(part, lambda rows: (rows / wide.type(len(given))).astype(dtype))
            for part in parts[1]
        ]
    assert list(map(bits, parts[0])) == list(map(bits, wanted))


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
        for kind, result in zip(each, taken, strict=True):
            wanted = [1, 4], [[6.0 if kind == "per_row" else 3.0], [6.0]], (9, 1)
            assert contents(result) in (wanted, [wanted] * len(mesh))
        assert contents(dense) in ([6.0], [[6.0]] * len(mesh))
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
