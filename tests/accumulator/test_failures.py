"""A failed launch or allocation leaves count, step and sum as they were."""

from __future__ import annotations

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator import take_now
from gradreduce.reduce.algorithms import ALGORITHMS


class InjectedError(RuntimeError):
    """The failure that a test plants."""


@pytest.fixture(params=["_launch", "_allocate"])
def method(request) -> str:
    """The method of a device that fails."""
    return request.param


@pytest.fixture
def inject_error():
    """Makes a method of devices fail from the n-th call on, ``times`` times; returns the calls.

    First removes a failure injected before. Without devices, it does only that.
    """
    patch = pytest.MonkeyPatch()

    def failing(real, calls, planned):
        def run(*args):
            calls.append(real.__name__)
            if len(calls) in planned:
                raise InjectedError(real.__name__)
            return real(*args)

        return run

    def injected(devices=(), method="", first=1, times=1):
        patch.undo()
        calls, planned = [], range(first, first + times)
        for device in devices:
            patch.setattr(device, method, failing(getattr(device, method), calls, planned))
        return calls

    yield injected
    patch.undo()


def counters(*accumulators):
    return [(acc.num_accumulated(), acc.global_step, acc.num_dropped) for acc in accumulators]


def values(acc):
    return [None if total is None else total.numpy().tolist()
            for total in acc.accumulator_ref.totals]  # fmt: skip


# -- one device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_first_apply(accumulator, device, inject_error, method, dtype):
    acc = accumulator(dtype)
    inject_error([device], method)
    with pytest.raises(InjectedError):
        acc.apply_grad([1.0])
    assert counters(acc) == [(0, 0, 0)]
    assert values(acc) == [None]
    acc.apply_grad([2.0, 3.0])  # the shape is still unknown, too
    assert acc.take_grad(1).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_later_apply(accumulator, device, inject_error, method, dtype):
    acc = accumulator(dtype)
    acc.apply_grad([1.0])
    calls = inject_error([device], method)
    if method == "_allocate":
        assert acc.apply_grad([3.0]), "it needs no memory"
        assert calls == []
        inject_error()
    else:
        with pytest.raises(InjectedError):
            acc.apply_grad([100.0])
        assert counters(acc) == [(1, 0, 0)]
        assert values(acc) == [[1.0]]
        assert acc.apply_grad([3.0])
    assert acc.take_grad(2).tolist() == [2.0]


def test_an_upload(accumulator, device, inject_error):
    acc = accumulator()
    acc.apply_grad([1.0, 1.0])
    inject_error([device], "_allocate")
    with pytest.raises(InjectedError):
        acc.apply_grad(np.ones(4, "float32")[::2])
    assert counters(acc) == [(1, 0, 0)]
    assert acc.take_grad(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_take(accumulator, device, inject_error, method, dtype):
    acc = accumulator(dtype)
    for value in (1.0, 3.0):
        acc.apply_grad([value])
    calls = inject_error([device], method)
    if dtype == "float32" and method == "_allocate":
        assert acc.take_grad(2).tolist() == [2.0], "it needs no memory"
        assert calls == []
        return
    with pytest.raises(InjectedError):
        acc.take_grad(2)
    assert counters(acc) == [(2, 0, 0)]
    assert values(acc) == [[4.0]]
    assert not acc.accumulator_ref.queue
    acc.apply_grad([8.0])
    assert acc.take_grad(2).tolist() == [4.0]
    assert counters(acc) == [(0, 1, 0)]


def test_a_take_that_does_not_wait(accumulator, device, inject_error, method):
    acc, empty = accumulator("float16"), accumulator()
    acc.apply_grad([3.0])
    inject_error([device], method)
    with pytest.raises(InjectedError):
        take_now([acc, empty], 1)
    assert counters(acc, empty) == [(1, 0, 0), (0, 0, 0)]
    assert values(acc) == [[3.0]]
    taken, nothing = take_now([acc, empty], 1)
    assert (taken.tolist(), nothing) == ([3.0], None)
    assert counters(acc, empty) == [(0, 1, 0), (0, 1, 0)]


def test_a_take_that_another_threads_apply_completes(
    accumulator, device, inject_error, method, call_threads
):
    """The consumer gets the error, the applier continues, and the next take is checked."""
    acc = accumulator("float16")
    takes = [call_threads.waiting(acc.take_grad, num_required) for num_required in (2, 2, 1)]
    acc.apply_grad([1.0])
    # Its own launch succeeds; the launch that completes the first take fails.
    inject_error([device], method, first=2 if method == "_launch" else 1)
    assert acc.apply_grad([3.0]) is True
    assert [take.is_done for take in takes] == [True, True, False]
    with pytest.raises(InjectedError):
        takes[0].result()
    assert takes[1].result().tolist() == [2.0]
    assert counters(acc) == [(0, 1, 0)]
    acc.apply_grad([5.0], 1)
    assert takes[2].result().tolist() == [5.0]


def test_every_waiting_take_may_fail(accumulator, device, inject_error, method, call_threads):
    acc = accumulator("float16")
    takes = [call_threads.waiting(acc.take_grad, 1) for _ in range(3)]
    inject_error([device], method, first=2, times=3)  # after the launch of the apply itself
    assert acc.apply_grad([3.0]) is True
    for take in takes:
        assert take.is_done
        with pytest.raises(InjectedError):
            take.result()
    assert counters(acc) == [(1, 0, 0)]
    assert values(acc) == [[3.0]]
    assert acc.take_grad(1, timeout=0).tolist() == [3.0]


def test_a_take_that_a_timeout_completes(accumulator, device, inject_error, method, call_threads):
    """The next consumer gets the error, not the one whose timeout expired."""
    acc = accumulator("float16")
    acc.apply_grad([3.0])
    head = call_threads.expiring(acc.take_grad, 2)
    behind = call_threads.waiting(acc.take_grad, 1)
    inject_error([device], method)
    head.expire()
    with pytest.raises(TimeoutError):
        head.result()
    with pytest.raises(InjectedError):
        behind.result()
    assert counters(acc) == [(1, 0, 0)]
    assert values(acc) == [[3.0]]


@pytest.mark.parametrize("step", ["_allocate", "_copy", "_launch"])
def test_replicas_that_are_added_on_one_device(mesh, inject_error, step):
    """If any allocation, copy or launch fails, no replica is added."""
    acc = gr.ConditionalAccumulator("float32", device=mesh.devices[0], reduction_type="SUM")
    grad = gr.PerReplica([device.upload(np.ones(2, "float32")) for device in mesh.devices])
    for applied in range(2):
        before = values(acc)
        for first in range(1, 10):
            calls = inject_error(mesh.devices, step, first=first)
            try:
                acc.apply_grad(grad)
            except InjectedError:
                assert counters(acc) == [(applied * len(mesh), 0, 0)]
                assert values(acc) == before
                continue
            assert len(calls) < first, "all have failed once"
            break
        inject_error()
    assert acc.take_grad(1).numpy().tolist() == [2.0 * len(mesh)] * 2


# -- several accumulators -------------------------------------------------------------------------


def test_a_joint_apply(accumulator, device, inject_error, method):
    accumulators = [accumulator(dtype) for dtype in ("float32", "float32", "float16")]
    accumulators[1].apply_grad([1.0])
    for first in (1, 2):
        inject_error([device], method, first=first)
        with pytest.raises(InjectedError):
            gr.apply_grads(accumulators, [[5.0], [5.0], [5.0]])
        assert counters(*accumulators) == [(0, 0, 0), (1, 0, 0), (0, 0, 0)]
        assert [values(acc) for acc in accumulators] == [[None], [[1.0]], [None]]
    assert gr.apply_grads(accumulators, [[5.0], [5.0], [5.0]])
    assert [array.tolist() for array in gr.take_grads(accumulators, 1)] == [[5.0], [3.0], [5.0]]


def test_a_joint_take(accumulator, device, inject_error, method):
    """All memory is allocated before the first launch, so a failed allocation harms no sum."""
    accumulators = [accumulator(dtype) for dtype in ("float32", "float16", "bfloat16")]
    for _ in range(2):
        gr.apply_grads(accumulators, [[2.0], [4.0], [6.0]])
    for first in (1, 2) if method == "_allocate" else (1,):
        inject_error([device], method, first=first)
        with pytest.raises(InjectedError):
            gr.take_grads(accumulators, 2)
        assert counters(*accumulators) == [(2, 0, 0)] * 3
        assert [values(acc) for acc in accumulators] == [[[4.0]], [[8.0]], [[12.0]]]
        assert [len(acc.accumulator_ref.queue) for acc in accumulators] == [0, 0, 0]
    assert [array.tolist() for array in gr.take_grads(accumulators, 2)] == [[2.0], [4.0], [6.0]]


def test_a_joint_take_that_an_apply_to_one_completes(
    accumulator, device, inject_error, method, call_threads
):
    first, second = accumulator("float16"), accumulator("float16")
    joint = call_threads.waiting(gr.take_grads, [first, second], 1)
    behind = call_threads.waiting(second.take_grad, 1)
    first.apply_grad([1.0])
    inject_error([device], method, first=2)
    assert second.apply_grad([2.0]) is True
    with pytest.raises(InjectedError):
        joint.result()
    assert behind.result().tolist() == [2.0]
    assert counters(first, second) == [(1, 0, 0), (0, 1, 0)]


# -- over a mesh ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_over_a_mesh(mesh, inject_error, method, algorithm):
    ops = gr.AllReduceCrossDeviceOps(algorithm)
    acc = gr.ConditionalAccumulator("float16", device=mesh, cross_device_ops=ops)
    wrong = gr.PerReplica([[50.0]] * len(mesh), mesh)
    right = gr.PerReplica([[float(place)] for place in range(len(mesh))], mesh)
    inject_error(mesh.devices, method)
    with pytest.raises(InjectedError):
        acc.apply_grad(wrong, cast=True)
    assert counters(acc) == [(0, 0, 0)]
    assert values(acc) == [None] * len(mesh)
    acc.apply_grad(right, cast=True)
    if method == "_launch":
        inject_error(mesh.devices, method)
        with pytest.raises(InjectedError):
            acc.apply_grad(wrong, cast=True)
        assert counters(acc) == [(len(mesh), 0, 0)]
    inject_error(mesh.devices, method)
    with pytest.raises(InjectedError):
        acc.take_grad(1)
    assert counters(acc) == [(len(mesh), 0, 0)]
    assert values(acc) == [[float(place)] for place in range(len(mesh))]
    mean = sum(range(len(mesh))) / len(mesh)
    taken = acc.take_grad(1)
    assert [value.tolist() for value in taken.values] == [[float(np.float16(mean))]] * len(mesh)


def test_a_take_over_a_partly_filled_mesh(mesh, inject_error, method):
    acc = gr.ConditionalAccumulator("float32", device=mesh)
    with gr.replica(1):
        acc.apply_grad([4.0])
    inject_error(mesh.devices, method)
    with pytest.raises(InjectedError):
        acc.take_grad(1)
    assert counters(acc) == [(1, 0, 0)]
    assert [value.tolist() for value in acc.take_grad(1).values] == [[4.0]] * len(mesh)
