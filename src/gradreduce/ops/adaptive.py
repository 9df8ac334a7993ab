"""Adam, Adagrad and RMSProp: launchers of ``adaptive.cu`` and NumPy references."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Device, Queue
from gradreduce.device.kernel import Arrays

from .update_kernels import Update, rule_kernel, run_plain, update
from .update_rules import RULES

__all__ = [
    "ADAGRAD",
    "ADAM",
    "RMSPROP",
    "RMSPROP_CENTERED",
    "adagrad",
    "adam",
    "rmsprop",
    "rmsprop_centered",
]


def _adam_reference(
    table: Sequence[Arrays],
    num_written: int,
    lr: float,
    one_minus_beta1: float,
    one_minus_beta2: float,
    epsilon: float,
) -> None:
    """Both means ``m``, ``v`` are updated; then ``var -= lr m / (sqrt(v) + epsilon)``."""
    run_plain(table, RULES["adam"], (lr, one_minus_beta1, one_minus_beta2, epsilon))


def _adagrad_reference(table: Sequence[Arrays], num_written: int, lr: float) -> None:
    """``sum += grad²; var -= lr grad / sqrt(sum)``."""
    run_plain(table, RULES["adagrad"], (lr,))


def _rmsprop_reference(
    table: Sequence[Arrays],
    num_written: int,
    lr: float,
    one_minus_decay: float,
    decay: float,
    epsilon: float,
) -> None:
    """``s += one_minus_decay (grad² - s); m = decay m + lr grad / sqrt(s + epsilon); var -= m``."""
    run_plain(table, RULES["rmsprop"], (lr, one_minus_decay, decay, epsilon))


def _rmsprop_centered_reference(
    table: Sequence[Arrays],
    num_written: int,
    lr: float,
    one_minus_decay: float,
    decay: float,
    epsilon: float,
) -> None:
    """As rmsprop, but divides by ``sqrt(s - c² + epsilon)``; ``c`` is the mean."""
    run_plain(table, RULES["rmsprop_centered"], (lr, one_minus_decay, decay, epsilon))


ADAM = rule_kernel("adam", "adaptive", _adam_reference, "plain")
ADAGRAD = rule_kernel("adagrad", "adaptive", _adagrad_reference, "plain")
RMSPROP = rule_kernel("rmsprop", "adaptive", _rmsprop_reference, "plain")
RMSPROP_CENTERED = rule_kernel("rmsprop_centered", "adaptive", _rmsprop_centered_reference, "plain")


def adam(
    rows: Sequence[Update],
    *,
    lr: float,
    one_minus_beta1: float,
    one_minus_beta2: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``variable -= lr * moment / (sqrt(square) + epsilon)``, after updating both means.

    ``moment += one_minus_beta1 * (grad - moment)``, and
    ``square += one_minus_beta2 * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment, square and gradient. See ``Update``.
        lr: the learning rate, with bias correction.
        one_minus_beta1: 1 - beta1.
        one_minus_beta2: 1 - beta2.
        epsilon: added to the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(ADAM, rows, (lr, one_minus_beta1, one_minus_beta2, epsilon), device, queue)


def adagrad(
    rows: Sequence[Update],
    *,
    lr: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``total += grad * grad; variable -= lr * grad / sqrt(total)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, total and gradient. See ``Update``.
        lr: the learning rate.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(ADAGRAD, rows, (lr,), device, queue)


def rmsprop(
    rows: Sequence[Update],
    *,
    lr: float,
    one_minus_decay: float,
    decay: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``moment = decay * moment + lr * grad / sqrt(square + epsilon); variable -= moment``.

    Before that ``square += one_minus_decay * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, square, moment and gradient. See ``Update``.
        lr: the learning rate.
        one_minus_decay: 1 - the decay of the square.
        decay: of the moment.
        epsilon: added to the square, inside the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(RMSPROP, rows, (lr, one_minus_decay, decay, epsilon), device, queue)


def rmsprop_centered(
    rows: Sequence[Update],
    *,
    lr: float,
    one_minus_decay: float,
    decay: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """As ``rmsprop`` with the variance ``square - mean * mean`` instead of ``square``.

    Before that ``mean += one_minus_decay * (grad - mean)``, like the square.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, square, mean, moment and gradient. See ``Update``.
        lr: the learning rate.
        one_minus_decay: 1 - the decay of the square and of the mean.
        decay: of the moment.
        epsilon: added to the variance, inside the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(RMSPROP_CENTERED, rows, (lr, one_minus_decay, decay, epsilon), device, queue)
