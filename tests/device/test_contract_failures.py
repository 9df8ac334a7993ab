"""A device that has failed says so at every use, and no other device fails with it."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from device.contract import (
    BACKENDS_APART,
    FLOAT,
    SIZE,
    add,
    adopted,
    calls_that_succeed,
    data,
    every_call,
    uploaded,
)
from support.exact_data import same
from support.meshes import refused

import gradreduce as gr
from gradreduce.device import ensure_accessible
from gradreduce.errors import BackendUnavailableError
from gradreduce.reduce.algorithms import ALGORITHMS

REASON = "it fell off the bus"


@pytest.fixture(params=BACKENDS_APART)
def mesh(request):
    with request.param([0, 0, 1, 2]) as opened:
        yield opened


def raises_failed(name: str):
    return pytest.raises(BackendUnavailableError, match=re.escape(f"{name} failed: {REASON}"))


def test_every_use_of_a_failed_device_says_which_and_why(mesh):
    buffer = uploaded(mesh.devices[0], 1)
    calls = every_call(mesh, buffer)
    mesh.synchronize()
    mesh.devices[0].mark_failed(REASON)
    assert calls_that_succeed(calls, f" failed: {REASON}") == []


def test_a_buffer_on_a_failed_device_is_refused_by_the_others(mesh):
    lost, device = mesh.devices[2], mesh.devices[0]
    far, near = uploaded(lost, 1), uploaded(device, 2)
    lost.synchronize()
    lost.mark_failed(REASON)
    uses = [
        lambda: device.copy(near, far),
        lambda: device.copy(far, near),
        lambda: add(device, near, near, far),
        lambda: device.download(far),
        lambda: gr.add_n([far, far]),
        lambda: ensure_accessible(device, far),
    ]
    for use in uses:
        with raises_failed(lost.name):
            use()
    assert same(near.numpy(), data((SIZE,), seed=2))


def test_logical_devices_of_a_failed_physical_device_fail_and_others_work(mesh):
    mesh.devices[0].mark_failed(REASON)
    mesh.devices[1].mark_failed("later reasons do not count")
    with raises_failed(mesh.devices[1].name):
        mesh.devices[1].empty((2,), FLOAT)
    total = gr.add_n([uploaded(mesh.devices[2], seed) for seed in (1, 2)], output_type="buffer")
    assert same(total.numpy(), data((SIZE,), seed=1) + data((SIZE,), seed=2))


def test_an_all_reduce_over_a_failed_device_launches_nothing(mesh):
    rows = [[uploaded(device, place)] for place, device in enumerate(mesh.devices)]
    mesh.devices[3].mark_failed(REASON)
    with mesh.journal() as journal:
        for algorithm in ALGORITHMS:
            ops = gr.AllReduceCrossDeviceOps(algorithm, mesh=mesh)
            with raises_failed(mesh.devices[3].name):
                ops.all_reduce(rows)
    assert (journal.launches, journal.copies) == (0, 0)


def test_what_a_failed_device_has_written_is_not_used(mesh):
    """Waiting for it could take for ever."""
    device, lost, other = mesh.devices[0], mesh.devices[2], mesh.devices[3]
    buffer, near, far = uploaded(device, 1), uploaded(device, 2), uploaded(other, 2)
    lost.copy(buffer, uploaded(lost, 3))
    other.copy(far, buffer)  # makes a mark, which a later wait could use again
    lost.mark_failed(REASON)
    uses = [
        buffer.numpy,
        lambda: add(device, near, buffer),
        lambda: device.fill_zero(buffer),
        lambda: device.release(buffer),
    ]
    if not mesh.mesh_state.order.is_needed:  # it was written at once
        uses = []
    for use in uses:
        with refused(mesh, BackendUnavailableError, f"{lost.name} failed: {REASON}"):
            use()
    assert same(near.numpy(), data((SIZE,), seed=2))


def test_what_a_failed_device_has_read_can_be_used(mesh):
    """Nobody needs what it has read. Other devices may write it, and so may callers."""
    device, lost, other = mesh.devices[0], mesh.devices[2], mesh.devices[3]
    buffer, theirs = uploaded(device, 1), adopted(device, data((SIZE,), seed=2))
    for each in (buffer, theirs):
        lost.copy(lost.empty((SIZE,), FLOAT), each, queue="transfer")
    lost.synchronize()
    lost.mark_failed(REASON)
    device.block_stream(None)
    add(device, buffer, theirs)
    other.copy(theirs, uploaded(other, 3))
    assert same(buffer.numpy(), data((SIZE,), seed=2))
    assert same(theirs.numpy(), data((SIZE,), seed=3))
    device.release(theirs)


def test_memory_that_a_failed_device_may_still_use_is_never_reused(mesh):
    device, other = mesh.devices[0], mesh.devices[2]
    buffer = uploaded(device, 1)
    other.copy(uploaded(other, 2), buffer)
    other.synchronize()
    address = buffer.address
    other.mark_failed(REASON)
    del buffer
    later = [device.empty((SIZE,), FLOAT) for _ in range(4)]
    if device.defers:  # else it has finished
        assert address not in [each.address for each in later]


def test_takes_that_wait_for_a_failed_device_raise(mesh):
    waiting = gr.ConditionalAccumulator("float32", device=mesh.devices[2])
    healthy = gr.ConditionalAccumulator("float32", device=mesh.devices[3])
    with ThreadPoolExecutor(1) as pool:
        take = pool.submit(waiting.take_grad, 1, timeout=60)
        while not waiting.accumulator_ref.queue:  # the thread's deadline is the take's
            assert not take.done()
        mesh.devices[2].mark_failed(REASON)
        assert isinstance(take.exception(60), gr.errors.CancelledError)
    with raises_failed(mesh.devices[2].name):
        waiting.take_grad(1)
    healthy.apply_grad(np.ones(3, np.float32))
    assert same(np.asarray(healthy.take_grad(1, output_type="numpy")), np.ones(3, np.float32))


def fail(*arguments):
    raise RuntimeError("no more")


def test_a_failure_half_way_through_an_update_fails_the_devices(mesh, monkeypatch):
    """A failure before the first launch fails none."""
    variable = gr.Variable(np.zeros(5, np.float32), device=mesh[2:4])
    optimizer = gr.GradientDescentOptimizer(1.0)
    grads = [(np.ones(5, np.float32), variable)]
    optimizer.apply_gradients(grads)
    first, device = mesh.devices[2:4]
    with monkeypatch.context() as patch:
        patch.setattr(first, "_launch", fail)
        with pytest.raises(RuntimeError, match="no more") as caught:
            optimizer.apply_gradients(grads)
    assert not hasattr(caught.value, "__notes__")
    optimizer.apply_gradients(grads)
    assert same(variable.numpy(), np.full(5, -2, np.float32))
    monkeypatch.setattr(device, "_launch", fail)
    with pytest.raises(RuntimeError, match="no more") as caught:
        optimizer.apply_gradients(grads)
    names = f"{first.name}, {device.name}"
    assert caught.value.__notes__ == [f"The call failed half way: {names} cannot be used any more."]
    for lost in (first, device):
        with pytest.raises(BackendUnavailableError, match="a call failed half way: RuntimeError"):
            lost.empty((1,), FLOAT)
    assert mesh.devices[0].zeros((1,), FLOAT).numpy() == 0


def test_a_collective_counts_as_submitted_work(mesh):
    """A collective writes in place, so a later failure leaves a half-written state."""
    first, other = mesh.devices[0], mesh.devices[2]
    buffers = [uploaded(first, 1), uploaded(other, 2)]
    with (
        pytest.raises(RuntimeError) as caught,
        mesh.mesh_state.fail_on_partial_write([first, other]),
    ):
        mesh.collective.all_reduce(buffers)
        raise RuntimeError("no more")
    assert "cannot be used any more" in caught.value.__notes__[0]
    for lost in (first, other):
        with pytest.raises(BackendUnavailableError, match="a call failed half way"):
            lost.empty((1,), FLOAT)
    assert mesh.devices[3].zeros((1,), FLOAT).numpy() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("work", ["launch", "copy"])
def test_interrupted_work_counts_as_submitted(mesh, monkeypatch, work, error):
    """The launch may have begun: of ten tensors it may have written nine."""
    device = mesh.devices[2]
    buffers = [uploaded(device, 1), uploaded(device, 2)]

    def stop(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(device, "_copy", stop)
        patch.setattr(device, "_make_launch", lambda *arguments: (stop, None))
        with pytest.raises(error), mesh.mesh_state.fail_on_partial_write([device]):
            if work == "copy":
                device.copy(*buffers)
            else:
                add(device, *buffers)
    if error is MemoryError and device.defers:  # raised before the work, at the wait
        assert device.zeros((1,), FLOAT).numpy() == 0
    else:
        with pytest.raises(BackendUnavailableError, match="a call failed half way"):
            device.empty((1,), FLOAT)
