"""How a gradient changes a variable: ``kernels/update.cu`` and its twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Device, Kernel, Queue
from gradreduce.device.kernel import Arrays

from ._templates import UPDATES
from ._updates import Update, run_rule, update

__all__ = ["MOMENTUM", "NESTEROV", "SGD", "momentum", "nesterov", "sgd"]

_Array = np.ndarray


def _sgd_twin(table: Sequence[Arrays], num_written: int, rate: float) -> None:
    """``var -= rate * grad``."""
    run_rule(table, 0, _sgd_step, 1, (rate,))


def _sgd_step(var: _Array, grad: _Array, step: _Array, rate: float) -> None:
    np.multiply(grad, rate, out=step)
    np.subtract(var, step, out=var)


def _momentum_twin(table: Sequence[Arrays], num_written: int, rate: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= rate * mom``."""
    run_rule(table, 1, _momentum_step, 1, (rate, decay))


def _momentum_step(
    var: _Array, mom: _Array, grad: _Array, step: _Array, rate: float, decay: float
) -> None:
    np.multiply(mom, decay, out=mom)
    np.add(mom, grad, out=mom)
    np.multiply(mom, rate, out=step)
    np.subtract(var, step, out=var)


def _nesterov_twin(table: Sequence[Arrays], num_written: int, rate: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= rate * grad + rate * decay * mom``."""
    run_rule(table, 1, _nesterov_step, 2, (rate, decay))


def _nesterov_step(
    var: _Array, mom: _Array, grad: _Array, ahead: _Array, step: _Array, rate: float, decay: float
) -> None:
    np.multiply(mom, decay, out=mom)
    np.add(mom, grad, out=mom)
    np.multiply(mom, rate * decay, out=ahead)
    np.multiply(grad, rate, out=step)
    np.add(step, ahead, out=step)
    np.subtract(var, step, out=var)


SGD = Kernel(
    "sgd", "update", _sgd_twin,
    (("num_written", "int64"), ("rate", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip
MOMENTUM = Kernel(
    "momentum", "update", _momentum_twin,
    (("num_written", "int64"), ("rate", "float64"), ("decay", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip
NESTEROV = Kernel(
    "nesterov", "update", _nesterov_twin,
    (("num_written", "int64"), ("rate", "float64"), ("decay", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip


def sgd(
    rows: Sequence[Update],
    *,
    rate: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``variable -= rate * grad``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable and gradient. See ``Update``.
        rate: the learning rate.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(SGD, rows, 0, (rate,), device, queue)


def momentum(
    rows: Sequence[Update],
    *,
    rate: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``moment = decay * moment + grad; variable -= rate * moment``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment and gradient. See ``Update``.
        rate: the learning rate.
        decay: how much of the moment stays.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(MOMENTUM, rows, 1, (rate, decay), device, queue)


def nesterov(
    rows: Sequence[Update],
    *,
    rate: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """As ``momentum``, but ``variable -= rate * grad + rate * decay * moment``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment and gradient. See ``Update``.
        rate: the learning rate.
        decay: how much of the moment stays.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(NESTEROV, rows, 1, (rate, decay), device, queue)
