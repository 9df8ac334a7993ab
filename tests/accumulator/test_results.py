"""Ownership of gradients and results, the launches of a cycle, and closing."""

from __future__ import annotations

import numpy as np
import pytest
from accumulator.kinds import Sparse, contents, counters, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


# -- whose memory ---------------------------------------------------------------------------------


def arrays(taken):
    """The arrays of a result, on every device."""
    parts = taken.values if isinstance(taken, gr.Mirrored) else [taken]
    return [part.values if isinstance(part, gr.IndexedSlices) else part for part in parts]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_and_gradients_belong_to_the_caller(home, kind, dtype):
    """No call writes a gradient, and no later one changes a result; both may be overwritten."""
    acc, held = kind.make(dtype, device=home), []
    copies = len(home) if isinstance(home, gr.Mesh) else 0
    for step in range(4):
        for value in range(step, step + 3):
            given = kind.value(value, dtype)
            (array,) = arrays(given)
            array.flags.writeable = False
            if kind is Sparse:
                indices = np.array([3, 1])
                acc.apply_grad(indices, array, None, step)
                indices[...] = 9
            else:
                acc.apply_grad(array, step)
            array.flags.writeable = True
            array[...] = 100
        wanted = kind.result(step + 1)
        held.append((*gr.take_grads([acc], 1), [wanted] * copies if copies else wanted))
        assert all(contents(taken) == result for taken, result in held)
    for taken, _ in held:
        for array in arrays(taken):
            array[...] = -1
    gr.apply_grads([acc], [kind.value(8, dtype)], 4)
    assert contents(gr.take_grads([acc], 1)) == [[kind.result(8)] * copies or kind.result(8)]


def test_a_taken_gradient_may_be_applied_again(device, kind):
    acc = kind.make("float32", device=device)
    gr.apply_grads([acc], [kind.value(3.0)])
    (taken,) = gr.take_grads([acc], 1)
    for _ in range(2):
        gr.apply_grads([acc], [taken], 1)
    (again,) = gr.take_grads([acc], 2)
    assert contents(again) == contents(taken) == kind.result(3.0)
    assert not np.shares_memory(*arrays(again), *arrays(taken))


def test_the_array_type_is_that_of_the_first_gradient_since_the_last_take(home, kind):
    acc = kind.make("float32", device=home)
    device = acc.accumulator_ref.devices[0]
    array = kind.value(1.0)
    buffer = mapped(array, device.put)
    for step, (first, other, wanted) in enumerate(
        [(array, buffer, np.ndarray), (buffer, array, gr.Buffer)] * 2
    ):
        gr.apply_grads([acc], [other], step - 1)  # stale
        for grad in (first, array, buffer):
            gr.apply_grads([acc], [grad], step)
        (taken,) = gr.take_grads([acc], 1)
        assert {type(each) for each in arrays(taken)} == {wanted}
        if wanted is gr.Buffer:
            assert arrays(taken)[0].device is device


# -- launches -------------------------------------------------------------------------------------


def steps(journal):
    return [(record.kind, record.name, record.num_rows) for record in journal.records]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_a_cycle_is_a_copy_additions_and_one_pass(accumulator, device, dtype, reduction_type):
    """Nothing is zeroed or copied, and the host does not wait."""
    acc = accumulator(dtype, reduction_type=reduction_type)
    grad = ones(50, dtype=dtype)
    for step in range(2):
        with device.mesh.journal() as journal:
            for _ in range(3):
                acc.apply_grad(grad, step)
            acc.take_grad(3)
        in_place = reduction_type == "SUM" and dtype.itemsize >= 4
        assert steps(journal) == [
            ("launch", "add_n", 1),
            ("launch", "accumulate_n", 1),
            ("launch", "accumulate_n", 1),
            *([] if in_place else [("launch", "all_sum", 1)]),
        ]


def test_the_mean_of_one_gradient_is_returned_without_a_division(accumulator, device):
    acc = accumulator()
    with device.mesh.journal() as journal:
        acc.apply_grad([1.0])
        acc.take_grad(1)
    assert steps(journal) == [("launch", "add_n", 1)]


def test_a_host_gradient_is_uploaded_to_the_accumulators_device():
    with gr.open_mesh(3, backend="sim", peer_access=False) as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh.devices[2])
        with mesh.journal() as journal:
            acc.apply_grad([1.0])
            with gr.replica(1):
                acc.apply_grad(ones(1))
        assert (journal.copies, journal.launches) == (0, 2)
        with mesh.journal() as journal:
            acc.apply_grad(mesh.devices[1].put(ones(1)))
        assert (journal.copies, journal.launches) == (1, 1), "a Buffer is pulled"
        assert acc.take_grad(3).tolist() == [1.0]


# -- the end --------------------------------------------------------------------------------------


def test_after_close_every_call_is_cancelled(accumulator):
    acc = accumulator()
    acc.apply_grad([1.0])
    acc.close()
    acc.close()
    for call in (
        lambda: acc.apply_grad([1.0]),
        lambda: acc.apply_grad([1.0], -1),
        lambda: acc.take_grad(1),
        lambda: acc.take_grad(1, timeout=0),
        acc.num_accumulated,
        lambda: acc.set_global_step(1),
    ):
        with pytest.raises(CancelledError):
            call()
    assert (acc.name, acc.dtype) == ("conditional_accumulator", np.float32)
    assert acc.global_step == acc.num_dropped == 0


def test_leaving_the_block_closes_and_frees(device, kind):
    device.drain()
    before = device._pool.live_bytes
    with kind.make("float32", device=device) as acc:
        gr.apply_grads([acc], [kind.random(1, "float32", (1000,))])
        assert device._pool.live_bytes > before
    device.drain()
    assert device._pool.live_bytes == before
    with pytest.raises(CancelledError):
        gr.apply_grads([acc], [kind.value(1.0)])
    with pytest.raises(KeyError, match="inside"), kind.make("float32", device=device) as acc:
        raise KeyError("inside")
    with pytest.raises(CancelledError):
        acc.take_grad(1)


def test_a_closed_mesh_raises():
    with gr.open_mesh(1, backend="sim") as mesh:
        acc = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
        acc.apply_grad([1.0])
    for call in (lambda: acc.apply_grad([1.0]), lambda: acc.take_grad(1)):
        with pytest.raises(BackendUnavailableError):
            call()
        assert counters(acc) == [(1, 0, 0)]


def test_a_call_inside_a_launch_sees_the_state_before_it(
    accumulator, device, call_threads, monkeypatch
):
    """Garbage collection may run a caller's finalizer there, which must not deadlock."""
    acc = accumulator()
    launch, seen = device.launch, []

    def recording_launch(*args, **kwargs):
        seen.extend(counters(acc))
        launch(*args, **kwargs)

    monkeypatch.setattr(device, "launch", recording_launch)
    assert call_threads.start(acc.apply_grad, [1.0]).result()
    assert call_threads.start(acc.apply_grad, [3.0]).result()
    assert call_threads.start(acc.take_grad, 2).result().tolist() == [2.0]
    assert seen == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
