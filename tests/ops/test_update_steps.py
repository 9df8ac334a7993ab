"""Adam, Adagrad and RMSProp: many steps against float64. test_update.py has the bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.implementations import Operand

from gradreduce.ops import RULE_KERNELS, RULES, update_rows

NUM_STEPS = 40


def adam_steps(grads):
    """Textbook Adam, element by element, in Python's numbers."""
    value = first = second = 0.0
    for step, grad in enumerate(grads, 1):
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad * grad
        corrected = second / (1 - 0.999**step)
        epsilon = 1e-8 / math.sqrt(1 - 0.999**step)  # TensorFlow adds it before the correction
        value -= 0.01 * first / (1 - 0.9**step) / (math.sqrt(corrected) + epsilon)
    return value


def adagrad_steps(grads):
    value, total = 0.0, 0.1
    for grad in grads:
        total += grad * grad
        value -= 0.01 * grad / math.sqrt(total)
    return value


def rmsprop_steps(grads):
    value, square, moment = 0.0, 1.0, 0.0
    for grad in grads:
        square = 0.9 * square + 0.1 * grad * grad
        moment = 0.5 * moment + 0.01 * grad / math.sqrt(square + 1e-10)
        value -= moment
    return value


def adam_scalars(step):
    return 0.01 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step), 0.1, 0.001, 1e-8


@pytest.mark.parametrize(
    ("name", "scalars", "starts", "model"),
    [
        ("adam", adam_scalars, (0, 0), adam_steps),
        ("adagrad", lambda step: (0.01,), (0.1,), adagrad_steps),
        ("rmsprop", lambda step: (0.01, 0.1, 0.5, 1e-10, 0), (1, 0), rmsprop_steps),
    ],
)
def test_many_steps_are_those_of_the_textbook(device, name, scalars, starts, model):
    kernel = RULE_KERNELS[RULES[name], "plain"]
    grads = np.random.default_rng(0).standard_normal((NUM_STEPS, 37))
    for dtype, bound in ((np.float64, 1e-14), (np.float32, 1e-6)):
        row = [Operand(device, np.full(37, start, dtype)) for start in (0, *starts)]
        for step, grad in enumerate(grads.astype(dtype), 1):
            operands = [*(operand.buffer for operand in row), device.upload(grad)]
            update_rows(kernel, [operands], scalars(step), device)
        wanted = [model(column) for column in grads.astype(dtype).astype(float).T]
        assert np.abs(row[0].array - wanted).max() < bound
