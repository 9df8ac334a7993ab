"""Ownership of gradients and results, the launches of a cycle, and closing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.exact_data import FLOATS, same

import gradreduce as gr
from gradreduce.errors import BackendUnavailableError, CancelledError, InvalidArgumentError


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def counters(acc):
    return acc.num_accumulated(), acc.global_step, acc.num_dropped


# -- whose memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_belong_to_the_caller(accumulator, dtype):
    acc = accumulator(dtype)
    taken, wanted = [], []
    for turn in range(4):
        for _ in range(turn + 1):
            acc.apply_grad(np.full(33, turn + 1, dtype), turn)
        taken.append(acc.take_grad(1))
        wanted.append(np.full(33, turn + 1, dtype))
        assert all(same(left, right) for left, right in zip(taken, wanted, strict=True))
    acc.apply_grad(np.full(33, 8, dtype), 4)
    for array in taken:
        array[...] = -1  # and may be overwritten
    assert same(acc.take_grad(1), np.full(33, 8, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_not_written_and_not_kept(accumulator, device, dtype):
    acc = accumulator(dtype)
    first, second = np.full(9, 2, dtype), np.full(9, 4, dtype)
    second.flags.writeable = False
    buffer = device.put(np.full(9, 6, dtype))
    for grad in (first, second, buffer):
        acc.apply_grad(grad)
    assert (first == 2).all()
    assert (second == 4).all()
    first[...] = 100
    device.release(buffer)[...] = 100
    taken = acc.take_grad(3)
    assert (taken == 4).all()
    taken[...] = 50
    assert (first == 100).all()
    assert (buffer.numpy() == 100).all()


def test_a_taken_gradient_may_be_applied_again(accumulator):
    acc = accumulator()
    acc.apply_grad([1.0, 2.0])
    taken = acc.take_grad(1)
    acc.apply_grad(taken, 1)
    acc.apply_grad(taken, 1)
    again = acc.take_grad(2)
    assert again.tolist() == taken.tolist() == [1.0, 2.0]
    assert not np.shares_memory(again, taken)


def test_the_array_type_is_that_of_the_first_gradient_since_the_last_take(accumulator, device):
    acc = accumulator()
    array, buffer = ones(2), device.put(ones(2))
    for turn, (first, kind) in enumerate(
        [(array, np.ndarray), (buffer, gr.Buffer), ([1.0, 1.0], np.ndarray), (buffer, gr.Buffer)]
    ):
        acc.apply_grad(buffer if first is not buffer else array, turn - 1)  # stale
        acc.apply_grad(first, turn)
        acc.apply_grad(array, turn)
        acc.apply_grad(buffer, turn)
        taken = acc.take_grad(1)
        assert type(taken) is kind
        assert (np.asarray(taken.numpy() if kind is gr.Buffer else taken) == 1).all()
    assert taken.device is device


def test_memory_does_not_grow(accumulator, device):
    acc = accumulator("float16")
    grad = ones(1000, dtype="float16")
    for step in range(100):
        for _ in range(3):
            acc.apply_grad(grad, step)
        acc.take_grad(3)
        if step == 2:
            grown = device._pool.grown
    assert device._pool.grown == grown


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


def test_dropped_and_refused_gradients_submit_no_device_work(accumulator, device):
    acc = accumulator(shape=(None,))
    acc.set_global_step(1)
    acc.apply_grad(ones(2), 1)
    with device.mesh.journal() as journal:
        assert not acc.apply_grad(ones(2), 0)
        for grad in (ones(3), ones(2, 2), ones(2, dtype="float64")):
            with pytest.raises(ValueError, match=r"mismatch|incompatible|float64"):
                acc.apply_grad(grad, 1)
        with pytest.raises(InvalidArgumentError):
            acc.take_grad(0)
        with pytest.raises(TimeoutError):
            acc.take_grad(2, timeout=0)
    assert journal.records == []


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


def test_leaving_the_block_closes_and_frees(accumulator, device):
    device.drain()
    before = device._pool.live_bytes
    with accumulator() as acc:
        acc.apply_grad(ones(10_000))
        assert device._pool.live_bytes > before
    device.drain()
    assert device._pool.live_bytes == before
    with pytest.raises(CancelledError):
        acc.num_accumulated()
    with pytest.raises(KeyError, match="inside"), accumulator() as acc:
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
        assert counters(acc) == (1, 0, 0)


def test_a_call_inside_a_launch_sees_the_state_before_it(
    accumulator, device, call_threads, monkeypatch
):
    """Garbage collection may run a caller's finalizer there, which must not deadlock."""
    acc = accumulator()
    launch, seen = device.launch, []

    def recording_launch(*args, **kwargs):
        seen.append(counters(acc))
        launch(*args, **kwargs)

    monkeypatch.setattr(device, "launch", recording_launch)
    assert call_threads.start(acc.apply_grad, [1.0]).result()
    assert call_threads.start(acc.apply_grad, [3.0]).result()
    assert call_threads.start(acc.take_grad, 2).result().tolist() == [2.0]
    assert seen == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


FORKED = """
import os, sys
import gradreduce as gr
mesh = gr.open_mesh(1, backend="sim")
acc = gr.ConditionalAccumulator("float32", device=mesh.devices[0], shared_name="forked")
acc.apply_grad([1.0])
if os.fork() == 0:
    for call in (lambda: acc.apply_grad([1.0]), lambda: acc.take_grad(1), acc.num_accumulated):
        try:
            call()
        except gr.errors.BackendUnavailableError as error:
            assert "before a fork" in str(error), error
        else:
            os._exit(1)
    with gr.open_mesh(1, backend="sim") as own:
        fresh = gr.ConditionalAccumulator("float32", device=own.devices[0])
        fresh.apply_grad([2.0])
        assert fresh.take_grad(1).tolist() == [2.0]
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
acc.apply_grad([3.0])
print(acc.take_grad(2).tolist())
"""


def test_a_forked_child_cannot_use_the_parents_accumulator():
    source = Path(gr.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[2.0]\n"), done.stderr
