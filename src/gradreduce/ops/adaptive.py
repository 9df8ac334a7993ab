"""How a gradient changes a variable that remembers its squares: ``kernels/adaptive.cu``, twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradreduce.device import Device, Kernel, Queue
from gradreduce.device.kernel import Arrays

from ._templates import UPDATES
from ._updates import Update, run_rule, update

__all__ = ["ADAGRAD", "ADAM", "RMSPROP", "adagrad", "adam", "rmsprop"]

_Array = np.ndarray


def _adam_twin(
    table: Sequence[Arrays],
    num_written: int,
    rate: float,
    rest1: float,
    rest2: float,
    epsilon: float,
) -> None:
    """``m += rest1 (grad - m); v += rest2 (grad² - v); var -= rate m / (root(v) + epsilon)``."""
    run_rule(table, 2, _adam_step, 2, (rate, rest1, rest2, epsilon))


def _adam_step(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, first: _Array, second: _Array, grad: _Array, step: _Array, by: _Array,
    rate: float, rest1: float, rest2: float, epsilon: float,
) -> None:  # fmt: skip
    np.subtract(grad, first, out=step)
    np.multiply(step, rest1, out=step)
    np.add(first, step, out=first)
    np.multiply(grad, grad, out=step)
    np.subtract(step, second, out=step)
    np.multiply(step, rest2, out=step)
    np.add(second, step, out=second)
    np.sqrt(second, out=by)
    np.add(by, epsilon, out=by)
    np.multiply(first, rate, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


def _adagrad_twin(table: Sequence[Arrays], num_written: int, rate: float) -> None:
    """``sum += grad²; var -= rate grad / root(sum)``."""
    run_rule(table, 1, _adagrad_step, 2, (rate,))


def _adagrad_step(
    var: _Array, total: _Array, grad: _Array, step: _Array, by: _Array, rate: float
) -> None:
    np.multiply(grad, grad, out=step)
    np.add(total, step, out=total)
    np.sqrt(total, out=by)
    np.multiply(grad, rate, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


def _rmsprop_twin(
    table: Sequence[Arrays],
    num_written: int,
    rate: float,
    rest: float,
    decay: float,
    epsilon: float,
) -> None:
    """``s += rest (grad² - s); m = decay m + rate grad / root(s + epsilon); var -= m``."""
    run_rule(table, 2, _rmsprop_step, 2, (rate, rest, decay, epsilon))


def _rmsprop_step(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, square: _Array, mom: _Array, grad: _Array, step: _Array, by: _Array,
    rate: float, rest: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    np.multiply(grad, grad, out=step)
    np.subtract(step, square, out=step)
    np.multiply(step, rest, out=step)
    np.add(square, step, out=square)
    np.add(square, epsilon, out=by)
    np.sqrt(by, out=by)
    np.multiply(grad, rate, out=step)
    np.true_divide(step, by, out=step)
    np.multiply(mom, decay, out=mom)
    np.add(mom, step, out=mom)
    np.subtract(var, mom, out=var)


ADAM = Kernel(
    "adam", "adaptive", _adam_twin,
    (("num_written", "int64"), ("rate", "float64"),
     ("rest1", "float64"), ("rest2", "float64"), ("epsilon", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip
ADAGRAD = Kernel(
    "adagrad", "adaptive", _adagrad_twin,
    (("num_written", "int64"), ("rate", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip
RMSPROP = Kernel(
    "rmsprop", "adaptive", _rmsprop_twin,
    (("num_written", "int64"), ("rate", "float64"),
     ("rest", "float64"), ("decay", "float64"), ("epsilon", "float64")),
    UPDATES, writes="num_written",
)  # fmt: skip


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
    """``variable -= rate * moment / (root(square) + epsilon)``, when both have moved on.

    ``moment += rest1 * (grad - moment); square += rest2 * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, moment, square and gradient. See ``Update``.
        rate: the learning rate, corrected for the start of the two means.
        rest1: how much of the moment is new: 1 - beta1.
        rest2: how much of the square is new: 1 - beta2.
        epsilon: added to the root.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(ADAM, rows, 2, (rate, rest1, rest2, epsilon), device, queue)


def adagrad(
    rows: Sequence[Update],
    *,
    rate: float,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``total += grad * grad; variable -= rate * grad / root(total)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, total and gradient. See ``Update``.
        rate: the learning rate.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(ADAGRAD, rows, 1, (rate,), device, queue)


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
    """``moment = decay * moment + rate * grad / root(square + epsilon); variable -= moment``.

    Before that ``square += rest * (grad * grad - square)``.

    One launch for all rows of the same dtypes.

    Args:
        rows: variable, square, moment and gradient. See ``Update``.
        rate: the learning rate.
        rest: how much of the square is new.
        decay: how much of the moment stays.
        epsilon: added to the square, under the root.
        device: whose queue launches; default that of the first variable. Fences nothing.
        queue: which of its queues.

    Raises:
        ValueError: what ``Update`` says does not hold.
    """
    update(RMSPROP, rows, 2, (rate, rest, decay, epsilon), device, queue)
