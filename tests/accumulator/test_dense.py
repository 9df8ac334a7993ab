"""A dense accumulator on one device: what it adds, counts and returns."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.exact_data import FLOATS, random_data, same

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError

WARNING = "Attempt to set current_global_step_ to smaller value"


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def counters(acc):
    return acc.num_accumulated(), acc.global_step, acc.num_dropped


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction_type", ["MEAN", "SUM"])
def test_a_take_includes_all_that_arrived_in_order(accumulator, combined, dtype, reduction_type):
    acc = accumulator(dtype, reduction_type=reduction_type)
    for turn in range(1, 7):
        grads = list(random_data((turn, 1003), dtype, seed=turn))
        for place, grad in enumerate(grads):
            assert acc.apply_grad(grad, turn - 1) is True
            assert counters(acc) == (place + 1, turn - 1, 0)
        taken = acc.take_grad(1)
        assert same(taken, combined(grads, reduction_type))
        assert counters(acc) == (0, turn, 0)


def test_mean_divides_by_the_count_not_by_what_was_required(accumulator):
    acc = accumulator(shape=(1,))
    for value in (1, 2, 6):
        acc.apply_grad([value])
    assert acc.take_grad(2).tolist() == [3.0]


@pytest.mark.parametrize(
    ("reduction_type", "values", "wanted"),
    [
        ("MEAN", [2048, 1, 1], 683.5),  # 2050 / 3 rounded once; in halves 2048 / 3 = 682.5
        ("SUM", [2048, 1, 1], 2050),
        ("MEAN", [60000, 60000], 60000),
        ("SUM", [60000, 60000], np.inf),
        ("MEAN", [1, 0, 0], 0.333251953125),
    ],
)
def test_half_precision_is_summed_in_float32_and_rounded_once(
    accumulator, reduction_type, values, wanted
):
    acc = accumulator("float16", reduction_type=reduction_type)
    for value in values:
        acc.apply_grad(np.array([value], "float16"))
    taken = acc.take_grad(len(values))
    assert taken.dtype == np.float16
    assert taken.tolist() == [wanted]


def test_the_order_is_that_of_arrival(accumulator):
    acc = accumulator(reduction_type="SUM")
    for value in (1e8, 1, -1e8):
        acc.apply_grad([value])
    assert acc.take_grad(3).tolist() == [0.0]


def test_nan_and_infinities_stay_in_their_element(accumulator):
    acc = accumulator(reduction_type="SUM")
    acc.apply_grad([np.nan, 1, np.inf, np.inf, 0])
    acc.apply_grad([1, 1, 1, -np.inf, -0.0])
    assert same(acc.take_grad(2), np.array([np.nan, 2, np.inf, np.nan, 0], "float32"))


def test_a_large_gradient_is_spread_over_threads(accumulator, combined):
    acc = accumulator("bfloat16")
    grads = list(random_data((3, 2**18 + 13), "bfloat16"))
    for grad in grads:
        acc.apply_grad(grad)
    assert same(acc.take_grad(3), combined(grads))


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
    assert counters(acc) == (3, 5, 4)


def test_a_take_moves_the_step_by_one_whatever_the_local_steps(accumulator):
    acc = accumulator(reduction_type="SUM")
    for turn in range(3):
        acc.apply_grad([1.0], turn + 100)
        acc.apply_grad([1.0], turn)
        acc.take_grad(2)
        assert acc.global_step == turn + 1
    assert not acc.apply_grad([1.0]), "the default step 0 is stale after a take"
    assert counters(acc) == (0, 3, 1)


def test_overlapping_steps_of_the_workers(accumulator):
    acc = accumulator()
    acc.set_global_step(1000)
    for turn in range(4):
        kept = [acc.apply_grad([1.0], 1000 + worker) for worker in range(5)]
        assert kept == [worker >= turn for worker in range(5)]
        assert acc.num_accumulated() == 5 - turn
        acc.take_grad(1)
    assert acc.num_dropped == 0 + 1 + 2 + 3


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_steps_may_be_variables_and_numpy_integers(accumulator, device, dtype):
    acc = accumulator()
    step = gr.Variable(3, trainable=False, dtype=dtype, device=device)
    acc.set_global_step(step)
    assert acc.global_step == 3
    step.assign_add(1)
    assert acc.global_step == 3, "the value is read, the Variable is not kept"
    assert acc.apply_grad([1.0], step)
    assert not acc.apply_grad([1.0], np.int64(2))
    acc.set_global_step(np.array(7, dtype))
    assert type(acc.global_step) is int
    assert acc.global_step == 7


def test_a_step_variable_may_be_on_any_device(accumulator, device):
    """Its value is read on this device, on another, on a whole mesh, and on another mesh."""
    acc = accumulator()
    with gr.open_mesh(3, backend="sim") as other:
        for value, home in enumerate((device, device.mesh.devices[0], device.mesh, other), 1):
            step = gr.Variable(value, trainable=False, dtype="int64", device=home)
            acc.set_global_step(step)
            assert acc.global_step == value
            assert acc.apply_grad([1.0], step)
            assert not acc.apply_grad([1.0], value - 1)
            with gr.replica(1):
                step.assign_add(1)
                acc.set_global_step(step)
            assert acc.global_step == value + 1


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
    assert counters(acc) == (0, -(2**63), 0)


@pytest.mark.parametrize("step", [0.0, 0.9, np.float32(1), "1", None, [1], np.array([1]), 1j])
def test_a_step_that_is_no_integer(accumulator, step):
    acc = accumulator()
    with pytest.raises(TypeError, match="local_step"):
        acc.apply_grad([1.0], step)
    with pytest.raises(TypeError, match="new_global_step"):
        acc.set_global_step(step)
    assert counters(acc) == (0, 0, 0)


def test_a_step_variable_that_holds_no_integer(accumulator, device):
    acc = accumulator()
    for value in (1.0, [1, 2]):
        step = gr.Variable(value, trainable=False, device=device)
        with pytest.raises(TypeError, match="new_global_step"):
            acc.set_global_step(step)
        with pytest.raises(TypeError, match="local_step"):
            acc.apply_grad([1.0], step)
    assert counters(acc) == (0, 0, 0)


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


def test_a_step_set_later_leaves_the_sum_alone(accumulator):
    acc = accumulator()
    acc.apply_grad([2.0])
    acc.apply_grad([4.0])
    acc.set_global_step(9)
    assert counters(acc) == (2, 9, 0)
    acc.apply_grad([6.0], 9)
    assert acc.take_grad(3).tolist() == [4.0]
    assert acc.global_step == 10


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
    assert seen == [(0, 1, 0)]


# -- shapes ---------------------------------------------------------------------------------------


def test_no_shape_is_fixed_by_the_first_gradient_until_the_next_take(accumulator):
    acc = accumulator()
    acc.apply_grad(ones(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"expected \[2, 3\], got \[3, 2\]"):
        acc.apply_grad(ones(3, 2))
    with pytest.raises(InvalidArgumentError, match=r"expected \[2, 3\], got \[\]"):
        acc.apply_grad(1.0)
    assert counters(acc) == (1, 0, 0)
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
    assert counters(acc) == (1, 0, 0)
    acc.take_grad(1)
    assert acc.apply_grad(ones(3, 2), 1)
    with pytest.raises(ValueError, match="incompatible"):
        acc.apply_grad(ones(3, 3), 1)


def test_the_shape_of_the_constructor_stays_in_force(accumulator):
    acc = accumulator(shape=(3, 2))
    for step in range(3):
        with pytest.raises(ValueError, match=r"\(2, 2\) and \(3, 2\) are incompatible"):
            acc.apply_grad(ones(2, 2), step)
        assert acc.apply_grad(ones(3, 2), step)
        acc.take_grad(1)


def test_what_is_checked_before_staleness_and_what_after(accumulator):
    acc = accumulator(shape=(None, 2))
    acc.set_global_step(1)
    acc.apply_grad(ones(3, 2), 1)
    with pytest.raises(ValueError, match="incompatible"):
        acc.apply_grad(ones(3, 3), 0)
    with pytest.raises(ValueError, match="float64"):
        acc.apply_grad(ones(3, 2, dtype="float64"), 0)
    assert acc.num_dropped == 0
    assert acc.apply_grad(ones(4, 2), 0) is False, "stale: its own shape is not looked at"
    assert counters(acc) == (1, 1, 1)
    with pytest.raises(InvalidArgumentError):
        acc.apply_grad(ones(4, 2), 1)
    assert counters(acc) == (1, 1, 1)
    assert (acc.take_grad(1) == ones(3, 2)).all()
