"""NumPy formulas of the update rules, in place, on blocks of the accumulate dtype.

A step is called ``step(var, *slots, grad, *scratch, *scalars)`` and changes ``var`` and the slots.
It writes each of them once: a signal handler that saves them finds old elements or new ones.
Source: the formulas of TensorFlow's Apply operations, as in the headers of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule.

    Attributes:
        step: the formula; see the module's docstring.
        num_slots: number of slots of each variable.
        num_scratch: number of scratch arrays of a block, uninitialized.
        scalars: names of its hyperparameters.
    """

    step: Callable[..., None]
    num_slots: int
    num_scratch: int
    scalars: tuple[str, ...]


def _sgd(var: _Array, grad: _Array, step: _Array, lr: float) -> None:
    np.multiply(grad, lr, out=step)
    np.subtract(var, step, out=var)


def _momentum(
    var: _Array, mom: _Array, grad: _Array, step: _Array, lr: float, decay: float
) -> None:
    np.multiply(mom, decay, out=step)
    np.add(step, grad, out=mom)
    np.multiply(mom, lr, out=step)
    np.subtract(var, step, out=var)


def _nesterov(
    var: _Array, mom: _Array, grad: _Array, ahead: _Array, step: _Array, lr: float, decay: float
) -> None:
    np.multiply(mom, decay, out=ahead)
    np.add(ahead, grad, out=mom)
    np.multiply(mom, lr * decay, out=ahead)
    np.multiply(grad, lr, out=step)
    np.add(step, ahead, out=step)
    np.subtract(var, step, out=var)


def _adam(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, first: _Array, second: _Array, grad: _Array, step: _Array, by: _Array,
    lr: float, one_minus_beta1: float, one_minus_beta2: float, epsilon: float,
) -> None:  # fmt: skip
    np.subtract(grad, first, out=step)
    np.multiply(step, one_minus_beta1, out=step)
    np.add(first, step, out=first)
    _decayed_square(second, grad, step, one_minus_beta2)
    np.sqrt(second, out=by)
    np.add(by, epsilon, out=by)
    np.multiply(first, lr, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


def _adagrad(var: _Array, total: _Array, grad: _Array, step: _Array, by: _Array, lr: float) -> None:
    np.multiply(grad, grad, out=step)
    np.add(total, step, out=total)
    np.sqrt(total, out=by)
    np.multiply(grad, lr, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


def _rmsprop(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, square: _Array, mom: _Array, grad: _Array, step: _Array, by: _Array,
    lr: float, one_minus_decay: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    _decayed_square(square, grad, step, one_minus_decay)
    np.add(square, epsilon, out=by)
    _divide_by_sqrt(var, mom, grad, step, by, lr, decay)


def _rmsprop_centered(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, square: _Array, mean: _Array, mom: _Array, grad: _Array,
    step: _Array, by: _Array, lr: float, one_minus_decay: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    _decayed_square(square, grad, step, one_minus_decay)
    np.subtract(grad, mean, out=step)
    np.multiply(step, one_minus_decay, out=step)
    np.add(mean, step, out=mean)
    np.multiply(mean, mean, out=by)
    np.subtract(square, by, out=by)
    np.add(by, epsilon, out=by)
    _divide_by_sqrt(var, mom, grad, step, by, lr, decay)


def _decayed_square(square: _Array, grad: _Array, step: _Array, one_minus_decay: float) -> None:
    """``square += one_minus_decay (grad² - square)``."""
    np.multiply(grad, grad, out=step)
    np.subtract(step, square, out=step)
    np.multiply(step, one_minus_decay, out=step)
    np.add(square, step, out=square)


def _divide_by_sqrt(
    var: _Array, mom: _Array, grad: _Array, step: _Array, by: _Array, lr: float, decay: float
) -> None:
    """``mom = decay mom + lr grad / sqrt(by); var -= mom``."""
    np.sqrt(by, out=by)
    np.multiply(grad, lr, out=step)
    np.true_divide(step, by, out=step)
    np.multiply(mom, decay, out=by)
    np.add(by, step, out=mom)
    np.subtract(var, mom, out=var)


RULES = {
    "sgd": Rule(_sgd, 0, 1, ("lr",)),
    "momentum": Rule(_momentum, 1, 1, ("lr", "decay")),
    "nesterov": Rule(_nesterov, 1, 2, ("lr", "decay")),
    "adam": Rule(_adam, 2, 2, ("lr", "one_minus_beta1", "one_minus_beta2", "epsilon")),
    "adagrad": Rule(_adagrad, 1, 2, ("lr",)),
    "rmsprop": Rule(_rmsprop, 2, 2, ("lr", "one_minus_decay", "decay", "epsilon")),
    "rmsprop_centered": Rule(
        _rmsprop_centered, 3, 2, ("lr", "one_minus_decay", "decay", "epsilon")
    ),
}
