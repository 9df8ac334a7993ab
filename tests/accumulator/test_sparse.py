"""The sparse accumulator on one device: indices, shapes and launches."""

from functools import partial

import numpy as np
import pytest
from accumulator.kinds import slices

import gradreduce as gr

# -- indices and shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_indices_of_every_dtype(sparse, device, dtype):
    """On the host and on a device; very large ones, too."""
    acc, large = sparse(), min(np.iinfo(dtype).max, 2**62)
    given, values = np.array([large, 3], dtype), np.array([[1.0], [2.0]], "float32")
    acc.apply_grad(device.put(given), device.put(values))
    acc.apply_grad(given[:1], [[3.0]])
    indices, values, _ = acc.take_grad(2)
    assert isinstance(indices, np.ndarray)
    assert (indices.dtype, indices.tolist()) == (np.int64, [3, large])
    assert isinstance(values, gr.Buffer)
    assert values.numpy().tolist() == [[2.0], [2.0]]


def test_rows_without_elements(sparse):
    acc = sparse()
    acc.apply_grad([4], np.empty((1, 0), "float32"))
    assert acc.take_grad(1)[1].shape == (1, 0)


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
    apply = partial(acc.apply_indexed_slices_grad, grad)
    for call in (apply, apply, apply, partial(acc.take_indexed_slices_grad, 1)):
        with device.mesh.journal() as journal:
            call()
        assert names(journal) == ["segment_sum"]
        assert (journal.uploads, journal.copies, journal.syncs) == (1, 0, 0)
        assert journal.of("fill") == []


@pytest.mark.parametrize(("shape", "capacity"), [(None, 256), ((200, 1), 200)])
def test_a_growing_sum_is_copied_rarely(sparse, device, shape, capacity):
    """The memory doubles each time, up to the shape: eight copies for 200 rows, not 200."""
    acc = sparse("float32", shape)
    with device.mesh.journal() as journal:
        for index in range(200):
            acc.apply_grad([index], [[1.0]])
    assert names(journal).count("segment_sum") == 200
    assert names(journal).count("pack") == 8
    assert acc.accumulator_ref.totals[0].values.shape == (capacity, 1)
    assert acc.take_grad(1)[1].sum() == 200


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
