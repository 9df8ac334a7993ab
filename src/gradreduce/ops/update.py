"""SGD and momentum updates: launchers of ``update.cu`` and NumPy references."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue
from gradreduce.device.kernel import Arrays

from .update_kernels import Update, rule_kernel, run_plain, update
from .update_rules import RULES

__all__ = ["MOMENTUM", "NESTEROV", "SGD", "momentum", "nesterov", "sgd"]


def _sgd_reference(table: Sequence[Arrays], num_written: int, lr: float) -> None:
    """``var -= lr * grad``."""
    run_plain(table, RULES["sgd"], (lr,))


def _momentum_reference(table: Sequence[Arrays], num_written: int, lr: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= lr * mom``."""
    run_plain(table, RULES["momentum"], (lr, decay))


def _nesterov_reference(table: Sequence[Arrays], num_written: int, lr: float, decay: float) -> None:
    """``mom = decay * mom + grad; var -= lr * grad + lr * decay * mom``."""
    run_plain(table, RULES["nesterov"], (lr, decay))


SGD = rule_kernel("sgd", "update", _sgd_reference, "plain")
MOMENTUM = rule_kernel("momentum", "update", _momentum_reference, "plain")
NESTEROV = rule_kernel("nesterov", "update", _nesterov_reference, "plain")


def sgd(
    rows: Sequence[Update],
    *,
    lr: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``variable -= lr * grad``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable and gradient. See ``Update``.
        lr: the learning rate.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(SGD, rows, (lr,), device, queue)


def momentum(
    rows: Sequence[Update],
    *,
    lr: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``moment = decay * moment + grad; variable -= lr * moment``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment and gradient. See ``Update``.
        lr: the learning rate.
        decay: of the moment.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(MOMENTUM, rows, (lr, decay), device, queue)


def nesterov(
    rows: Sequence[Update],
    *,
    lr: float,
    decay: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """As ``momentum``, but ``variable -= lr * grad + lr * decay * moment``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment and gradient. See ``Update``.
        lr: the learning rate.
        decay: of the moment.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(NESTEROV, rows, (lr, decay), device, queue)
