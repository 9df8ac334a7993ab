"""Steps: which are stale, what a step may be, and warnings about lower ones."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from accumulator.kinds import counters

import gradreduce as gr
from gradreduce.errors import InvalidArgumentError


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


def test_a_step_is_an_integer_of_64_bits(accumulator, device):
    acc = accumulator()
    acc.set_global_step(-(2**63))
    large = [2**63, -(2**63) - 1, 10**30, np.uint64(2**63)]
    large.append(gr.Variable(large[-1], trainable=False, device=device))
    others = [0.0, 0.9, np.float32(1), "1", None, [1], np.array([1]), 1j]
    others += [gr.Variable(each, trainable=False, device=device) for each in (1.0, [1, 2])]
    for steps, error, text in (
        (large, InvalidArgumentError, r"=-?\d+ does not fit in int64"),
        (others, TypeError, ""),
    ):
        for step in steps:
            with pytest.raises(error, match=f"^local_step{text}"):
                acc.apply_grad([1.0], step)
            with pytest.raises(error, match=f"^new_global_step{text}"):
                acc.set_global_step(step)
    assert counters(acc) == [(0, -(2**63), 0)]


def test_a_lower_step_warns_and_takes_effect(accumulator, call_threads):
    """No lock is held then: another thread can use the accumulator. A load does not warn."""
    acc, seen = accumulator(), []
    state = acc.state_dict()

    class Handler(logging.Handler):
        def emit(self, record):
            others = call_threads.start(counters, acc).result()
            seen.append((record.levelname, record.getMessage(), others))

    logger, handler = logging.getLogger("gradreduce"), Handler()
    logger.addHandler(handler)
    try:
        for step in (3, 3, 5, 2, -4):
            call_threads.start(acc.set_global_step, step).result()
        acc.set_global_step(7)
        acc.load_state_dict(state)
    finally:
        logger.removeHandler(handler)
    text = "Attempt to set current_global_step_ to smaller value: current {} >= new {}"
    assert seen == [
        ("WARNING", text.format(5, 2), [(0, 2, 0)]),
        ("WARNING", text.format(2, -4), [(0, -4, 0)]),
    ]
    assert acc.global_step == 0
