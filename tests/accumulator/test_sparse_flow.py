"""Launches, uploads, memory and waiting of sparse gradients, and joint calls with dense."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import contents, counters, slices

import gradreduce as gr


def rows(*values):
    return np.array(values, "float32").reshape(len(values), -1)


# -- launches -------------------------------------------------------------------------------------


def names(journal):
    return [record.name for record in journal.of("launch")]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gradient_is_one_launch_and_one_upload_and_a_take_too(sparse, device, dtype):
    acc = sparse(dtype)
    grad = gr.IndexedSlices(device.put(np.ones((3, 4), dtype)), [5, 2, 5])
    for _ in range(3):
        with device.mesh.journal() as journal:
            acc.apply_indexed_slices_grad(grad)
        assert names(journal) == ["segment_sum"]
        assert (journal.uploads, journal.copies, journal.syncs) == (1, 0, 0)
        assert journal.of("fill") == []
    with device.mesh.journal() as journal:
        acc.take_indexed_slices_grad(1)
    assert names(journal) == ["segment_sum"]
    assert (journal.uploads, journal.copies, journal.syncs) == (1, 0, 0)
    assert journal.of("fill") == []


def test_a_growing_sum_is_copied_rarely(sparse, device):
    """The memory doubles each time: ten copies for a thousand rows, not a thousand."""
    acc = sparse()
    with device.mesh.journal() as journal:
        for index in range(1000):
            acc.apply_grad([index], [[1.0]])
    assert names(journal).count("segment_sum") == 1000
    assert names(journal).count("pack") == 10
    assert acc.take_grad(1)[1].sum() == 1000


def test_a_sum_never_takes_more_than_its_shape(sparse, device):
    acc = sparse("float32", (5, 2))
    for index in (0, 1, 2, 3, 4):
        acc.apply_grad([index], [[1.0, 2.0]])
    (total,) = acc.accumulator_ref.totals
    assert total.values.shape == (5, 2)


def test_equal_counts_upload_no_divisors(sparse, device):
    acc = sparse()
    for _ in range(3):
        acc.apply_grad([1, 2], rows(1, 2))
    with device.mesh.journal() as journal:
        acc.take_grad(1)
    even = journal.of("upload")[0].nbytes
    for indices in ([1, 2], [1, 2], [1]):
        acc.apply_grad(indices, rows(*indices), None, 1)
    with device.mesh.journal() as journal:
        acc.take_grad(1)
    assert journal.of("upload")[0].nbytes > even


# -- with others ----------------------------------------------------------------------------------


def test_sparse_and_dense_together(sparse, accumulator, device):
    """One launch for all sparse ones of a dtype, one decision for all."""
    accumulators = [sparse(), accumulator(), sparse(), accumulator()]
    grads = [slices([4, 4], 1, 2), rows(5), slices([0], 3), rows(6)]
    with device.mesh.journal() as journal:
        assert gr.apply_grads(accumulators, grads)
    assert sorted(names(journal)) == ["add_n", "segment_sum"]
    with device.mesh.journal() as journal:
        assert gr.apply_grads(accumulators, grads)
    assert sorted(names(journal)) == ["accumulate_n", "segment_sum"]
    accumulators[2].set_global_step(1)
    assert gr.apply_grads(accumulators, grads) is False
    assert counters(*accumulators) == [(2, 0, 1), (2, 0, 1), (2, 1, 1), (2, 0, 1)]
    with device.mesh.journal() as journal:
        first, second, third, fourth = gr.take_grads(accumulators, 2)
    assert sorted(names(journal)) == ["all_sum", "segment_sum", "segment_sum"]
    assert contents([first, second]) == [([4], [[3]], (-1, 1)), [[5]]]
    assert contents([third, fourth]) == [([0], [[3]], (-1, 1)), [[6]]]


# -- sparse gradients in a dense accumulator ------------------------------------------------------


def test_a_dense_accumulator_makes_sparse_gradients_dense(accumulator, device):
    acc = accumulator("float32", reduction_type="SUM")
    acc.apply_grad(gr.IndexedSlices(rows(1, 2, 4), [2, 0, 2], (3, 1)))
    acc.apply_grad(rows(1, 1, 1))
    taken = acc.take_grad(2)
    assert isinstance(taken, np.ndarray)
    assert taken.tolist() == [[3], [1], [6]]
    acc = accumulator("float32", (3, 1))
    acc.apply_grad(slices([1], 5))  # without a shape, it has the accumulator's
    assert acc.take_grad(1).tolist() == [[0], [5], [0]]


def test_sparse_gradients_that_do_not_fit_a_dense_accumulator(accumulator, device):
    for shape, grad, text in [
        (None, slices([1], 5), "dense_shape .*unknown"),
        ((3, 1), slices([3], 5), "not below"),
        ((3, 1), gr.IndexedSlices(rows(5), [0], (4, 1)), "incompatible"),
        ((3, 2), slices([1], 5), "not rows of an array"),
        (None, gr.IndexedSlices(np.ones((1, 1)), [0], (3, 1)), "the gradient is float64"),
    ]:
        acc = accumulator("float32", shape)
        for step in (0, -1):
            with device.mesh.journal() as journal, pytest.raises(ValueError, match=text):
                acc.apply_grad(grad, step)
            assert journal.records == []
        assert counters(acc) == [(0, 0, 0)]
    acc = accumulator("float32", (3, 1))
    with device.mesh.journal() as journal:
        assert acc.apply_grad(slices([1], 5), -1) is False
    assert journal.records == []
    assert counters(acc) == [(0, 0, 1)]
