"""TensorFlow's conditional accumulator, called eagerly, if it is installed.

Steps and counts are Python integers, as in a training loop; the gradient is an existing tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from itertools import count

import numpy as np

from .clock import Call

__all__ = ["CYCLE", "DROP", "find_accumulator_peer"]

CYCLE, DROP = "tf apply + take", "tf drop"


def find_accumulator_peer(gradient: np.ndarray) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns its calls for one gradient, and the reason if there are none."""
    if importlib.util.find_spec("tensorflow") is None:
        return {}, {"tensorflow": "not installed"}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = importlib.import_module("tensorflow")
    accumulator = tf.compat.v1.ConditionalAccumulator(
        tf.as_dtype(gradient.dtype), shape=gradient.shape
    )
    tensor = tf.constant(gradient)
    steps = count()

    def cycle() -> None:
        accumulator.apply_grad(tensor, next(steps))
        accumulator.take_grad(1)

    def drop() -> None:
        accumulator.apply_grad(tensor, -1)

    try:
        cycle()
    except RuntimeError as error:  # TensorFlow 1 has no eager accumulator
        return {}, {"tensorflow": str(error).splitlines()[0]}
    return {CYCLE: cycle, DROP: drop}, {}
