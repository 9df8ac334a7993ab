"""Ownership of gradients and results, and closing."""

import numpy as np
import pytest
from accumulator.kinds import Sparse, contents, counters, mapped
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError

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
    wanted = [[kind.result(8)] * copies or kind.result(8)]
    gr.apply_grads([acc], [kind.value(8, dtype)], 4)
    (taken,) = gr.take_grads([acc], 1)
    first = taken.primary if copies else taken
    for _ in range(2):  # a result may be a gradient again
        gr.apply_grads([acc], [first], 5)
    again = gr.take_grads([acc], 2)
    assert contents(again) == contents([taken]) == wanted
    for one, other in zip(arrays(again[0]), arrays(taken), strict=True):
        assert not np.shares_memory(one, other)


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


# -- the end --------------------------------------------------------------------------------------


def test_after_close_every_call_raises(accumulator):
    """Of the accumulator, or of its mesh, whose accumulators keep their counts."""
    acc = accumulator(name="acc")
    with gr.open_mesh(1, backend="sim") as mesh:
        of_closed_mesh = gr.ConditionalAccumulator("float32", device=mesh.devices[0])
        for each in (acc, of_closed_mesh):
            each.apply_grad([1.0])
    acc.close()
    acc.close()
    state = accumulator().state_dict()
    for closed, error, text in [
        (acc, CancelledError, "^the accumulator 'acc' was closed"),
        (of_closed_mesh, BackendUnavailableError, "was closed"),
    ]:
        for call in (
            lambda acc: acc.apply_grad([1.0]),
            lambda acc: acc.take_grad(1),
            lambda acc: acc.take_grad(1, timeout=0),
            lambda acc: acc.state_dict(),
            lambda acc: acc.load_state_dict(state),
        ):
            with pytest.raises(error, match=text):
                call(closed)
    for call in (lambda: acc.apply_grad([1.0], -1), acc.num_accumulated,
                 lambda: acc.set_global_step(1)):  # fmt: skip
        with pytest.raises(CancelledError):
            call()
    assert counters(of_closed_mesh) == [(1, 0, 0)]
    assert (acc.name, acc.dtype, acc.global_step, acc.num_dropped) == ("acc", np.float32, 0, 0)


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
