"""Launches, uploads, memory and waiting of sparse gradients, and joint calls with dense."""

from __future__ import annotations

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError


@pytest.fixture
def sparse(device):
    """Makes sparse accumulators on the device."""

    def make(dtype="float32", shape=None, **options):
        return gr.SparseConditionalAccumulator(dtype, shape, device=device, **options)

    return make


def counters(*accumulators):
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


def rows(*values):
    return np.array(values, "float32").reshape(len(values), -1)


def slices(indices, *values):
    return gr.IndexedSlices(rows(*values), indices)


def contents(taken):
    return taken.indices.tolist(), np.asarray(taken.values).ravel().tolist()


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


def test_dropped_and_refused_gradients_submit_no_device_work(sparse, device):
    acc = sparse("float32", (9, 1))
    acc.set_global_step(3)
    with device.mesh.journal() as journal:
        assert acc.apply_grad([1], rows(1), None, 2) is False
        assert acc.apply_indexed_slices_grad(slices([1], 1), 2) is False
        with pytest.raises(InvalidArgumentError):
            acc.apply_grad([9], rows(1), None, 3)
    assert journal.records == []
    assert counters(acc) == [(0, 3, 2)]


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


# -- memory ---------------------------------------------------------------------------------------


def test_results_belong_to_the_caller_and_gradients_are_not_written(sparse, device):
    acc = sparse()
    held = []
    for step in range(4):
        given = rows(step, 2)
        given.flags.writeable = False
        acc.apply_grad([3, step], given, None, step)
        acc.apply_grad([3, step], given, None, step)
        taken = acc.take_indexed_slices_grad(2)
        held.append((taken, contents(taken)))
        assert all(contents(each) == wanted for each, wanted in held)
    for each, _ in held:
        each.values[...] = -1  # and may be overwritten
    acc.apply_grad([3], rows(8), None, 4)
    assert contents(acc.take_indexed_slices_grad(1)) == ([3], [8])


def test_a_gradient_may_be_overwritten_when_the_call_has_returned(sparse):
    acc = sparse()
    given, indices = rows(1, 2), np.array([4, 0])
    acc.apply_grad(indices, given)
    given[...], indices[...] = 100, 9
    assert contents(acc.take_indexed_slices_grad(1)) == ([0, 4], [2, 1])


def test_a_taken_gradient_may_be_applied_again(sparse):
    acc, other = sparse(), sparse(reduction_type="SUM")
    acc.apply_grad([3, 1], rows(1, 2))
    taken = acc.take_indexed_slices_grad(1)
    for _ in range(2):
        other.apply_indexed_slices_grad(taken)
    assert contents(other.take_indexed_slices_grad(2)) == ([1, 3], [4, 2])
    assert contents(taken) == ([1, 3], [2, 1])


def test_close_frees_the_rows(sparse, device):
    device.drain()
    before = device._pool.live_bytes
    with sparse() as acc:
        acc.apply_grad(np.arange(1000), np.ones((1000, 4), "float32"))
        assert device._pool.live_bytes > before
    device.drain()
    assert device._pool.live_bytes == before
    with pytest.raises(CancelledError):
        acc.apply_grad([0], rows(1))


# -- waiting --------------------------------------------------------------------------------------


def test_a_take_waits_and_is_first_come_first_served(sparse, call_threads):
    acc = sparse()
    takes = [
        call_threads.waiting(acc.take_indexed_slices_grad, 2),
        call_threads.waiting(acc.take_grad, 1),
    ]
    acc.apply_grad([1], rows(1))
    assert [take.is_done for take in takes] == [False, False]
    acc.apply_grad([], np.empty((0, 1), "float32"))  # counted, although it has no rows
    assert contents(takes[0].result()) == ([1], [1])
    assert acc.apply_grad([5], rows(1), None, 0) is False
    acc.apply_grad([5], rows(7), None, 1)
    indices, values, _ = takes[1].result()
    assert (indices.tolist(), values.tolist()) == ([5], [[7]])
    with pytest.raises(DeadlineExceededError, match="0 of 3 gradients, 3 missing, 1 dropped"):
        acc.take_grad(3, timeout=0)
    last = call_threads.waiting(acc.take_grad, 1)
    acc.close()
    with pytest.raises(CancelledError):
        last.result()


def test_num_required_must_be_positive(sparse):
    acc = sparse()
    acc.apply_grad([1], rows(1))
    for take in (acc.take_grad, acc.take_indexed_slices_grad):
        with pytest.raises(InvalidArgumentError, match="must be positive, but was 0"):
            take(0)
    assert counters(acc) == [(1, 0, 0)]


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
    assert contents(first) == ([4], [3])
    assert second.tolist() == [[5]]
    assert contents(third) == ([0], [3])
    assert fourth.tolist() == [[6]]


def test_one_incompatible_gradient_rejects_the_whole_call(sparse, accumulator, device):
    accumulators = [accumulator(), sparse("float32", (4, 1)), sparse()]
    good = [rows(5), slices([3], 1), slices([9], 1)]
    gr.apply_grads(accumulators, good)
    for place, wrong, error in [
        (1, slices([4], 1), InvalidArgumentError),
        (2, gr.IndexedSlices(np.ones((1, 2), "float32"), [0]), InvalidArgumentError),
        (2, rows(1), TypeError),
        (0, rows(1, 2), InvalidArgumentError),
    ]:
        grads = [wrong if place == each else grad for each, grad in enumerate(good)]
        with device.mesh.journal() as journal, pytest.raises(error):
            gr.apply_grads(accumulators, grads)
        assert journal.launches == 0
        assert counters(*accumulators) == [(1, 0, 0)] * 3


def test_a_joint_take_waits_for_the_sparse_one_too(sparse, accumulator, call_threads):
    dense, rows_of = accumulator(), sparse()
    take = call_threads.waiting(gr.take_grads, [dense, rows_of], 1)
    dense.apply_grad(rows(1))
    assert not take.is_done
    rows_of.apply_grad([2], rows(3))
    one, two = take.result()
    assert one.tolist() == [[1]]
    assert contents(two) == ([2], [3])


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
