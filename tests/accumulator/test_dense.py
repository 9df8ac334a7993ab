"""A dense accumulator on one device: what it adds, counts and returns."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from accumulator.kinds import counters
from support.exact_data import FLOATS

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError

WARNING = "Attempt to set current_global_step_ to smaller value"


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def test_scalars(accumulator):
    acc = accumulator("float64", shape=())
    for grad in (np.array(1.0), 2, 6.0, np.float64(0)):
        assert acc.apply_grad(grad)
    taken = acc.take_grad(1)
    assert (taken.shape, taken.item()) == ((), 2.25)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_without_elements_count_and_launch_nothing(accumulator, device, dtype):
    acc = accumulator(dtype, shape=(None, 3))
    with device.mesh.journal() as journal:
        for _ in range(2):
            assert acc.apply_grad(np.empty((0, 3), dtype))
        assert acc.num_accumulated() == 2
        taken = acc.take_grad(2)
    assert (taken.shape, taken.dtype) == ((0, 3), dtype)
    assert journal.launches == 0
    acc.apply_grad(np.ones((2, 3), dtype), 1)
    assert acc.take_grad(1).shape == (2, 3)


def test_a_gradient_that_is_not_contiguous(accumulator):
    acc = accumulator()
    whole = np.arange(24, dtype="float32").reshape(4, 6)
    acc.apply_grad(whole.T)
    acc.apply_grad(whole.T[:, ::-1])
    assert (acc.take_grad(2) == (whole.T + whole.T[:, ::-1]) / 2).all()


# -- staleness ------------------------------------------------------------------------------------


def test_only_an_earlier_step_is_stale(accumulator):
    acc = accumulator()
    acc.set_global_step(5)
    kept = [acc.apply_grad([float(step)], step) for step in (4, 5, 6, 2**63 - 1, 0, -1, -(2**63))]
    assert kept == [False, True, True, True, False, False, False]
    assert counters(acc) == [(3, 5, 4)]


def test_a_step_may_be_a_variable_on_any_device_or_a_numpy_integer(accumulator, device):
    """Its value is read on this device, on another, on a whole mesh, and on another mesh."""
    acc = accumulator()
    with gr.open_mesh(3, backend="sim") as other:
        homes = device, device.mesh.devices[0], device.mesh, other
        dtypes = "int64", "int32", "uint8", "int64"
        for value, (home, dtype) in enumerate(zip(homes, dtypes, strict=True), 1):
            step = gr.Variable(value, trainable=False, dtype=dtype, device=home)
            acc.set_global_step(step)
            assert acc.global_step == value
            assert acc.apply_grad([1.0], step)
            assert not acc.apply_grad([1.0], np.int64(value - 1))
            with gr.replica(1):
                step.assign_add(1)
                assert acc.global_step == value, "the value is read, the Variable is not kept"
                acc.set_global_step(step)
            assert acc.global_step == value + 1
        acc.set_global_step(np.array(7, "int32"))
        assert (type(acc.global_step), acc.global_step) == (int, 7)


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 10**30, np.uint64(2**63)])
def test_a_step_beyond_int64(accumulator, device, step):
    acc = accumulator()
    acc.set_global_step(-(2**63))
    steps = [step]
    if isinstance(step, np.uint64):
        steps.append(gr.Variable(step, trainable=False, device=device))
    for each in steps:
        with pytest.raises(InvalidArgumentError, match=f"^local_step={step} does not fit in int64"):
            acc.apply_grad([1.0], each)
        with pytest.raises(InvalidArgumentError, match=f"^new_global_step={step} does not fit"):
            acc.set_global_step(each)
    assert counters(acc) == [(0, -(2**63), 0)]


def test_a_step_that_is_no_integer(accumulator, device):
    acc = accumulator()
    steps = [0.0, 0.9, np.float32(1), "1", None, [1], np.array([1]), 1j]
    steps += [gr.Variable(each, trainable=False, device=device) for each in (1.0, [1, 2])]
    for step in steps:
        with pytest.raises(TypeError, match="local_step"):
            acc.apply_grad([1.0], step)
        with pytest.raises(TypeError, match="new_global_step"):
            acc.set_global_step(step)
    assert counters(acc) == [(0, 0, 0)]


def test_a_lower_step_warns_and_takes_effect(accumulator, caplog):
    acc = accumulator()
    with caplog.at_level(logging.WARNING, "gradreduce"):
        for step in (3, 3, 5):
            acc.set_global_step(step)
        assert caplog.records == []
        acc.set_global_step(2)
        acc.set_global_step(-4)
    assert [record.getMessage() for record in caplog.records] == [
        f"{WARNING}: current 5 >= new 2",
        f"{WARNING}: current 2 >= new -4",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert acc.global_step == -4
    assert acc.apply_grad([1.0], -4)
    assert not acc.apply_grad([1.0], -5)


def test_a_handler_of_the_warning_may_use_the_accumulator(accumulator, call_threads):
    """No lock is held while it is called: even another thread can use the accumulator."""
    acc = accumulator()
    acc.set_global_step(5)
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(call_threads.start(counters, acc).result())

    logger, handler = logging.getLogger("gradreduce"), Handler()
    logger.addHandler(handler)
    try:
        call_threads.start(acc.set_global_step, 1).result()
    finally:
        logger.removeHandler(handler)
    assert seen == [[(0, 1, 0)]]


# -- shapes ---------------------------------------------------------------------------------------


def test_no_shape_is_fixed_by_the_first_gradient_until_the_next_take(accumulator):
    acc = accumulator()
    acc.apply_grad(ones(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"expected \[2, 3\], got \[3, 2\]"):
        acc.apply_grad(ones(3, 2))
    with pytest.raises(InvalidArgumentError, match=r"expected \[2, 3\], got \[\]"):
        acc.apply_grad(1.0)
    assert counters(acc) == [(1, 0, 0)]
    assert acc.take_grad(1).shape == (2, 3)
    assert acc.apply_grad(ones(4), 1)
    assert acc.take_grad(1).shape == (4,)


def test_none_entries(accumulator):
    acc = accumulator(shape=[None, 2])
    for shape in ((2,), (1, 3), (1, 2, 1), ()):
        with pytest.raises(ValueError, match="incompatible") as caught:
            acc.apply_grad(ones(*shape))
        assert not isinstance(caught.value, InvalidArgumentError)
    assert acc.apply_grad(ones(1, 2))
    with pytest.raises(InvalidArgumentError, match=r"expected \[1, 2\], got \[3, 2\]"):
        acc.apply_grad(ones(3, 2))
    assert counters(acc) == [(1, 0, 0)]
    acc.take_grad(1)
    assert acc.apply_grad(ones(3, 2), 1)
    with pytest.raises(ValueError, match="incompatible"):
        acc.apply_grad(ones(3, 3), 1)


def test_what_is_checked_before_staleness_and_what_after(accumulator, device):
    acc = accumulator(shape=(None, 2))
    acc.set_global_step(1)
    acc.apply_grad(ones(3, 2), 1)
    with device.mesh.journal() as journal:
        with pytest.raises(ValueError, match="incompatible"):
            acc.apply_grad(ones(3, 3), 0)
        with pytest.raises(ValueError, match="float64"):
            acc.apply_grad(ones(3, 2, dtype="float64"), 0)
        assert acc.num_dropped == 0
        assert acc.apply_grad(ones(4, 2), 0) is False, "stale: its own shape is not looked at"
        assert counters(acc) == [(1, 1, 1)]
        with pytest.raises(InvalidArgumentError):
            acc.apply_grad(ones(4, 2), 1)
        with pytest.raises(InvalidArgumentError):
            acc.take_grad(0)
        with pytest.raises(TimeoutError):
            acc.take_grad(2, timeout=0)
    assert journal.records == []
    assert counters(acc) == [(1, 1, 1)]
    assert (acc.take_grad(1) == ones(3, 2)).all()
