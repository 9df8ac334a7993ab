"""The update rules: what each is called, its slots, its scalars and its NumPy formula.

A step is called ``step(var, *slots, grad, *scratch, *scalars)``, on blocks of the accumulate dtype,
and changes ``var`` and the slots in place. It writes each of them once: a signal handler that saves
them finds old elements or new ones. Its CUDA struct in ``kernels/rules.cuh`` has the same order of
operations. Source: the formulas of TensorFlow's Apply operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import numpy as np

_Array = np.ndarray


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """An update rule.

    Attributes:
        name: of the rule. Its CUDA struct has this name in CamelCase.
        step: the formula; see the module's docstring.
        slots: names of the slots of each variable.
        num_scratch: number of scratch arrays of a block, uninitialized.
        scalars: names of its scalars, in the order of the members of the struct.
    """

    name: str
    step: Callable[..., None]
    slots: tuple[str, ...]
    num_scratch: int
    scalars: tuple[str, ...]

    @property
    def struct(self) -> str:
        """Name of the template in ``kernels/rules.cuh``: ``RmspropCentered``."""
        return self.name.title().replace("_", "")


RULES: dict[str, UpdateRule] = {}


def _rule(num_scratch: int) -> Callable[[Callable[..., None]], UpdateRule]:
    """Makes a step an ``UpdateRule``: names of slots and scalars are those of its parameters."""

    def made(step: Callable[..., None]) -> UpdateRule:
        names = tuple(signature(step).parameters)
        grad = names.index("grad")
        scalars = names[grad + 1 + num_scratch :]
        rule = UpdateRule(step.__name__, step, names[1:grad], num_scratch, scalars)
        RULES[rule.name] = rule
        return rule

    return made


@_rule(num_scratch=1)
def sgd(var: _Array, grad: _Array, step: _Array, lr: float) -> None:
    """``var -= lr grad``."""
    np.multiply(grad, lr, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=1)
def momentum(
    var: _Array, momentum: _Array, grad: _Array, step: _Array, lr: float, decay: float
) -> None:
    """``momentum = decay momentum + grad; var -= lr momentum``."""
    np.multiply(momentum, decay, out=step)
    np.add(step, grad, out=momentum)
    np.multiply(momentum, lr, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def nesterov(
    var: _Array, momentum: _Array, grad: _Array, ahead: _Array, step: _Array,
    lr: float, decay: float,
) -> None:  # fmt: skip
    """``momentum = decay momentum + grad; var -= lr grad + lr decay momentum``."""
    np.multiply(momentum, decay, out=ahead)
    np.add(ahead, grad, out=momentum)
    np.multiply(momentum, lr * decay, out=ahead)
    np.multiply(grad, lr, out=step)
    np.add(step, ahead, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def adam(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, m: _Array, v: _Array, grad: _Array, step: _Array, by: _Array,
    lr: float, one_minus_beta1: float, one_minus_beta2: float, epsilon: float,
) -> None:  # fmt: skip
    """``m += one_minus_beta1 (grad - m)``, v likewise; ``var -= lr m / (√v + epsilon)``."""
    np.subtract(grad, m, out=step)
    np.multiply(step, one_minus_beta1, out=step)
    np.add(m, step, out=m)
    _decayed_square(v, grad, step, one_minus_beta2)
    np.sqrt(v, out=by)
    np.add(by, epsilon, out=by)
    np.multiply(m, lr, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def adagrad(
    var: _Array, accumulator: _Array, grad: _Array, step: _Array, by: _Array, lr: float
) -> None:
    """``accumulator += grad²; var -= lr grad / √accumulator``."""
    np.multiply(grad, grad, out=step)
    np.add(accumulator, step, out=accumulator)
    np.sqrt(accumulator, out=by)
    np.multiply(grad, lr, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def rmsprop(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, rms: _Array, momentum: _Array, grad: _Array, step: _Array, by: _Array,
    lr: float, one_minus_decay: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    """``rms += one_minus_decay (grad² - rms)``, and a step by ``√(rms + epsilon)``."""
    _decayed_square(rms, grad, step, one_minus_decay)
    np.add(rms, epsilon, out=by)
    _divide_by_sqrt(var, momentum, grad, step, by, lr, decay)


@_rule(num_scratch=2)
def rmsprop_centered(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Array, rms: _Array, mg: _Array, momentum: _Array, grad: _Array,
    step: _Array, by: _Array, lr: float, one_minus_decay: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    """As RMSProp, with the mean ``mg`` of gradients; a step by ``√(rms - mg² + epsilon)``."""
    _decayed_square(rms, grad, step, one_minus_decay)
    np.subtract(grad, mg, out=step)
    np.multiply(step, one_minus_decay, out=step)
    np.add(mg, step, out=mg)
    np.multiply(mg, mg, out=by)
    np.subtract(rms, by, out=by)
    np.add(by, epsilon, out=by)
    _divide_by_sqrt(var, momentum, grad, step, by, lr, decay)


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
