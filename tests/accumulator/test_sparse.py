"""The sparse accumulator on one device: against a dictionary of rows, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import contents, counters, slices

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError

# -- indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_indices_of_every_dtype(sparse, dtype):
    acc = sparse()
    acc.apply_grad(np.array([9, 3], dtype), np.ones((2, 1), "float32"))
    indices = acc.take_grad(1)[0]
    assert (indices.dtype, indices.tolist()) == (np.int64, [3, 9])


def test_indices_on_a_device(sparse, device):
    acc = sparse()
    acc.apply_grad(device.put(np.array([9, 3])), device.put(np.ones((2, 1), "float32")))
    indices, values, _ = acc.take_grad(1)
    assert isinstance(indices, np.ndarray)
    assert indices.tolist() == [3, 9]
    assert isinstance(values, gr.device.Buffer)


def test_very_large_indices(sparse):
    acc = sparse()
    acc.apply_grad([2**62, 1], [[1.0], [2.0]])
    acc.apply_grad([2**62], [[3.0]])
    indices, values, _ = acc.take_grad(2)
    assert (indices.tolist(), values.tolist()) == ([1, 2**62], [[2.0], [2.0]])


def test_a_gradient_without_rows_counts(sparse, device):
    acc = sparse()
    empty = np.empty((0, 3), "float32")
    with device.mesh.journal() as journal:
        assert acc.apply_grad([], empty)
        assert acc.apply_grad(np.empty(0, "int32"), empty)
        taken = acc.take_indexed_slices_grad(2)
    assert journal.launches == 0
    assert (taken.indices.tolist(), taken.values.shape, taken.dense_shape) == ([], (0, 3), (-1, 3))
    acc.apply_grad([], empty, None, 1)
    acc.apply_grad([4], [[1, 2, 3]], None, 1)
    acc.apply_grad([], empty, None, 1)
    indices, values, _ = acc.take_grad(3)
    assert (indices.tolist(), values.tolist()) == ([4], [[1, 2, 3]])
    acc.apply_grad([4], empty[:, :0].reshape(0, 0)[:0].reshape(1, 0), None, 2)  # a row of nothing
    assert acc.take_grad(1)[1].shape == (1, 0)


REFUSED = {
    "negative": ([-1], [[1.0, 2.0]], None, "indices\\[0\\] = -1 is negative"),
    "too large for the shape": ([0, 4], np.ones((2, 2)), None, "index is 4 exceeded 4"),
    "too large for its own shape": ([3], [[1, 2]], (3, 2), "not below dense_shape\\[0\\] = 3"),
    "too few": ([0], np.ones((2, 2)), None, "1 indices for 2 rows"),
    "no vector": ([[0]], [[1.0, 2.0]], None, "indices must be a vector"),
    "a scalar": ([0], 1.0, None, "at least one dimension"),
    "rows of another shape": ([0], [[1.0]], None, "expected values dim 1 to be 2, got 1"),
    "too few dimensions": ([0], [1.0], None, "expected values rank at least 2, got 1"),
    "another shape": ([0], [[1, 2]], (5, 2), "expected shape dim 0 to be 4, got 5"),
    "a shape of fewer dimensions": ([0], [[1, 2]], (4,), "not rows of an array of shape"),
}


@pytest.mark.parametrize(("indices", "values", "shape", "text"), REFUSED.values(), ids=REFUSED)
def test_incompatible_values_change_nothing(sparse, device, indices, values, shape, text):
    acc = sparse("float32", (4, 2))
    acc.apply_grad([1], [[1, 1]])
    values = np.asarray(values, "float32")
    for step in (0, -1):  # a stale gradient too
        with device.mesh.journal() as journal, pytest.raises(InvalidArgumentError, match=text):
            acc.apply_grad(indices, values, shape, step)
        assert journal.records == []
    assert counters(acc) == [(1, 0, 0)]
    indices, values, shape = acc.take_grad(1)
    assert (indices.tolist(), values.tolist(), shape) == ([1], [[1, 1]], (4, 2))


@pytest.mark.parametrize("indices", [[0.0], ["a"], [None], np.array([True])])
def test_indices_that_are_no_integers(sparse, indices):
    acc = sparse()
    with pytest.raises((TypeError, ValueError)):
        acc.apply_grad(indices, [[1.0]])
    assert counters(acc) == [(0, 0, 0)]


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dense_shape", "wanted"),
    [
        (None, None, (-1, 2)),
        ((), None, (-1, 2)),
        (None, (7, 2), (7, 2)),
        (None, (-1, 2), (-1, 2)),
        ((None, 2), (7, 2), (7, 2)),
        ((None, None), None, (-1, 2)),
        ((9,), None, (9, 2)),
        ((9, None), (9, 2), (9, 2)),
    ],
)
def test_the_shape_of_a_take(sparse, shape, dense_shape, wanted):
    acc = sparse("float32", shape)
    for step in range(2):  # the take forgets the shape
        acc.apply_grad([3], [[1, 2]], dense_shape, step)
        assert acc.take_grad(1)[2] == wanted
    acc.apply_grad([3], [[1, 2]], None, 2)
    assert acc.take_grad(1)[2] == (9 if shape == (9,) or shape == (9, None) else -1, 2)


def test_the_first_gradient_fixes_unknown_dimensions_until_the_take(sparse):
    acc = sparse()
    acc.apply_grad([3], [[1, 2]], (7, 2))
    acc.apply_grad([6], [[1, 2]])
    for indices, values, shape, text in [
        ([7], [[1, 2]], None, r"not below dense_shape\[0\] = 7"),
        ([0], [[1, 2]], (8, 2), r"expected \[7, 2\], got \[8, 2\]"),
        ([0], [[1, 2, 3]], None, r"expected \[7, 2\], got \[-1, 3\]"),
        ([0], [1], None, r"expected \[7, 2\], got \[-1\]"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            acc.apply_grad(indices, values, shape)
        assert acc.apply_grad(indices, values, shape, -1) is False, "stale comes first here"
    assert counters(acc) == [(2, 0, 4)]
    acc.take_grad(2)
    assert acc.apply_grad([70], [[1, 2, 3]], None, 1)


# -- dtypes and kinds -----------------------------------------------------------------------------


def test_invalid_sparse_gradients_are_refused(sparse, device):
    acc = sparse()
    for grad in (np.ones((2, 2), "float32"), device.put(np.ones(2, "float32")), None, [1.0]):
        with pytest.raises(TypeError, match="expects IndexedSlices"):
            acc.apply_indexed_slices_grad(grad)
    with pytest.raises(TypeError, match="expects IndexedSlices"):
        gr.apply_grads([acc], [gr.PerReplica([[1.0]], devices=[device])])
    assert counters(acc) == [(0, 0, 0)]


def test_a_shared_name_is_either_dense_or_sparse(device, sparse):
    first = sparse("float32", (4, 2), shared_name="of rows")
    assert sparse("float32", (4, 2), shared_name="of rows").accumulator_ref is first.accumulator_ref
    with pytest.raises(
        ValueError, match="has format gradreduce sparse accumulator 1, not gradreduce dense"
    ):
        gr.ConditionalAccumulator("float32", (4, 2), shared_name="of rows", device=device)
    assert sparse().name == "sparse_conditional_accumulator"
    assert isinstance(first, gr.ConditionalAccumulatorBase)


# -- launches -------------------------------------------------------------------------------------


def array(*values):
    """Rows of float32."""
    return np.array(values, "float32").reshape(len(values), -1)


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
        acc.apply_grad([1, 2], array(1, 2))
    with device.mesh.journal() as journal:
        acc.take_grad(1)
    even = journal.of("upload")[0].nbytes
    for indices in ([1, 2], [1, 2], [1]):
        acc.apply_grad(indices, array(*indices), None, 1)
    with device.mesh.journal() as journal:
        acc.take_grad(1)
    assert journal.of("upload")[0].nbytes > even


# -- with others ----------------------------------------------------------------------------------


def test_sparse_and_dense_together(sparse, accumulator, device):
    """One launch for all sparse ones of a dtype, one decision for all."""
    accumulators = [sparse(), accumulator(), sparse(), accumulator()]
    grads = [slices([4, 4], 1, 2), array(5), slices([0], 3), array(6)]
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
    acc.apply_grad(gr.IndexedSlices(array(1, 2, 4), [2, 0, 2], (3, 1)))
    acc.apply_grad(array(1, 1, 1))
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
        ((3, 1), gr.IndexedSlices(array(5), [0], (4, 1)), "incompatible"),
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
