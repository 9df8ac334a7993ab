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
    rate: float,
    rest1: float,
    rest2: float,
    epsilon: float,
) -> None:
    """``m += rest1 (grad - m); v += rest2 (grad² - v); var -= rate m / (sqrt(v) + epsilon)``."""
    run_plain(table, RULES["adam"], (rate, rest1, rest2, epsilon))


def _adagrad_reference(table: Sequence[Arrays], num_written: int, rate: float) -> None:
    """``sum += grad²; var -= rate grad / sqrt(sum)``."""
    run_plain(table, RULES["adagrad"], (rate,))


def _rmsprop_reference(
    table: Sequence[Arrays],
    num_written: int,
    rate: float,
    rest: float,
    decay: float,
    epsilon: float,
) -> None:
    """``s += rest (grad² - s); m = decay m + rate grad / sqrt(s + epsilon); var -= m``."""
    run_plain(table, RULES["rmsprop"], (rate, rest, decay, epsilon))


def _rmsprop_centered_reference(
    table: Sequence[Arrays],
    num_written: int,
    rate: float,
    rest: float,
    decay: float,
    epsilon: float,
) -> None:
    """As rmsprop with the variance: ``c += rest (grad - c)``, ``sqrt(s - c² + epsilon)``."""
    run_plain(table, RULES["rmsprop_centered"], (rate, rest, decay, epsilon))


ADAM = rule_kernel("adam", "adaptive", _adam_reference, "plain")
ADAGRAD = rule_kernel("adagrad", "adaptive", _adagrad_reference, "plain")
RMSPROP = rule_kernel("rmsprop", "adaptive", _rmsprop_reference, "plain")
RMSPROP_CENTERED = rule_kernel("rmsprop_centered", "adaptive", _rmsprop_centered_reference, "plain")


def adam(
    rows: Sequence[Update],
    *,
    rate: float,
    rest1: float,
    rest2: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``variable -= rate * moment / (sqrt(square) + epsilon)``, after updating both means.

    ``moment += rest1 * (grad - moment); square += rest2 * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment, square and gradient. See ``Update``.
        rate: the learning rate, with bias correction.
        rest1: 1 - beta1.
        rest2: 1 - beta2.
        epsilon: added to the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(ADAM, rows, (rate, rest1, rest2, epsilon), device, queue)


def adagrad(
    rows: Sequence[Update],
    *,
    rate: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``total += grad * grad; variable -= rate * grad / sqrt(total)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, total and gradient. See ``Update``.
        rate: the learning rate.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(ADAGRAD, rows, (rate,), device, queue)


def rmsprop(
    rows: Sequence[Update],
    *,
    rate: float,
    rest: float,
    decay: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``moment = decay * moment + rate * grad / sqrt(square + epsilon); variable -= moment``.

    Before that ``square += rest * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, square, moment and gradient. See ``Update``.
        rate: the learning rate.
        rest: 1 - the decay of the square.
        decay: of the moment.
        epsilon: added to the square, inside the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(RMSPROP, rows, (rate, rest, decay, epsilon), device, queue)


def rmsprop_centered(
    rows: Sequence[Update],
    *,
    rate: float,
    rest: float,
    decay: float,
    epsilon: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """As ``rmsprop`` with the variance ``square - mean * mean`` instead of ``square``.

    Before that ``mean += rest * (grad - mean)``, like the square.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, square, mean, moment and gradient. See ``Update``.
        rate: the learning rate.
        rest: 1 - the decay of the square and of the mean.
        decay: of the moment.
        epsilon: added to the variance, inside the square root.
        device: launches on its queue; default that of the first variable. Adds no stream
            waits.
        queue: the queue to launch on.

    Raises:
        ValueError: a row is not as ``Update`` describes.
    """
    update(RMSPROP_CENTERED, rows, (rate, rest, decay, epsilon), device, queue)
