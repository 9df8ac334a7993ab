"""The update rules: name, slots, scalars and NumPy formula of each.

A step is called ``step(var, *slots, grad, *scratch, *scalars)``, on blocks of the accumulate dtype,
and changes ``var`` and the slots in place. It writes each of them once: a signal handler that saves
them finds old elements or new ones. Its CUDA struct in ``kernels/rules.cuh`` has the same order of
operations. Source: the formulas of TensorFlow's Apply operations, of torch.optim.AdamW, and of Lion
(https://arxiv.org/abs/2302.06675).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import numpy as np

_Data = np.ndarray


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """An update rule.

    Attributes:
        name: the name of the rule; its CUDA struct has this name in CamelCase.
        step: the formula; see the module's docstring.
        slots: the names of the slots of each variable.
        num_scratch: the number of uninitialized scratch arrays of a block.
        scalars: the names of its scalars, in the order of the members of the struct.
        may_overwrite_grad: whether the scratch array may be the gradient.
    """

    name: str
    step: Callable[..., None]
    slots: tuple[str, ...]
    num_scratch: int
    scalars: tuple[str, ...]
    may_overwrite_grad: bool

    @property
    def struct(self) -> str:
        """The name of the struct in ``kernels/rules.cuh``, such as ``RmspropCentered``."""
        return self.name.title().replace("_", "")


RULES: dict[str, UpdateRule] = {}


def _rule(
    num_scratch: int, *, may_overwrite_grad: bool = False
) -> Callable[[Callable[..., None]], UpdateRule]:
    """Makes an ``UpdateRule`` of a step, whose parameters name the slots and scalars."""

    def decorate(step: Callable[..., None]) -> UpdateRule:
        names = tuple(signature(step).parameters)
        grad = names.index("grad")
        scalars = names[grad + 1 + num_scratch :]
        rule = UpdateRule(
            step.__name__, step, names[1:grad], num_scratch, scalars, may_overwrite_grad
        )
        RULES[rule.name] = rule
        return rule

    return decorate


@_rule(num_scratch=1, may_overwrite_grad=True)
def sgd(var: _Data, grad: _Data, step: _Data, lr: float) -> None:
    """``var -= lr grad``."""
    np.multiply(grad, lr, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=1)
def momentum(
    var: _Data, momentum: _Data, grad: _Data, step: _Data, lr: float, decay: float
) -> None:
    """``momentum = decay momentum + grad; var -= lr momentum``."""
    np.multiply(momentum, decay, out=step)
    np.add(step, grad, out=momentum)
    np.multiply(momentum, lr, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def nesterov(
    var: _Data, momentum: _Data, grad: _Data, ahead: _Data, step: _Data,
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
def delayed_nesterov(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, momentum: _Data, delayed: _Data, grad: _Data, step: _Data, by: _Data,
    lr_each: float, lr: float, decay: float, num_pushes: float, is_last: float,
) -> None:  # fmt: skip
    """``delayed += grad; var -= lr_each grad``; with ``is_last`` also a step by the momentum.

    Then ``momentum = decay momentum + delayed / num_pushes; var -= lr decay momentum``, and
    ``delayed = 0``.
    """
    np.add(delayed, grad, out=by)
    if is_last:
        np.true_divide(by, num_pushes, out=by)
        np.multiply(momentum, decay, out=step)
        np.add(step, by, out=momentum)
        np.multiply(momentum, lr * decay, out=by)
        np.multiply(grad, lr_each, out=step)
        np.add(step, by, out=step)
        by.fill(0)
    else:
        np.multiply(grad, lr_each, out=step)
    np.positive(by, out=delayed)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def adam(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, m: _Data, v: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, one_minus_beta1: float, one_minus_beta2: float, epsilon: float,
) -> None:  # fmt: skip
    """``m += one_minus_beta1 (grad - m)``, v likewise; ``var -= lr m / (√v + epsilon)``."""
    _adam_step(m, v, grad, step, by, lr, one_minus_beta1, one_minus_beta2, epsilon)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def adamw(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, m: _Data, v: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, one_minus_beta1: float, one_minus_beta2: float, epsilon: float, scale: float,
) -> None:  # fmt: skip
    """As Adam, with ``var = scale var - …``; scale is ``1 - lr weight_decay``."""
    _adam_step(m, v, grad, step, by, lr, one_minus_beta1, one_minus_beta2, epsilon)
    np.multiply(var, scale, out=by)
    np.subtract(by, step, out=var)


@_rule(num_scratch=2)
def lion(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, m: _Data, grad: _Data, step: _Data, by: _Data, lr: float,
    beta1: float, one_minus_beta1: float, beta2: float, one_minus_beta2: float, scale: float,
) -> None:  # fmt: skip
    """``var = scale var - lr sign(beta1 m + one_minus_beta1 grad)``; then m, likewise by beta2."""
    np.multiply(m, beta1, out=step)
    np.multiply(grad, one_minus_beta1, out=by)
    np.add(step, by, out=step)
    np.sign(step, out=step)
    np.multiply(step, lr, out=step)
    np.multiply(var, scale, out=by)
    np.subtract(by, step, out=var)
    np.multiply(m, beta2, out=step)
    np.multiply(grad, one_minus_beta2, out=by)
    np.add(step, by, out=m)


@_rule(num_scratch=2)
def adagrad(var: _Data, accumulator: _Data, grad: _Data, step: _Data, by: _Data, lr: float) -> None:
    """``accumulator += grad²; var -= lr grad / √accumulator``."""
    np.multiply(grad, grad, out=step)
    np.add(accumulator, step, out=accumulator)
    np.sqrt(accumulator, out=by)
    np.multiply(grad, lr, out=step)
    np.true_divide(step, by, out=step)
    np.subtract(var, step, out=var)


@_rule(num_scratch=2)
def rmsprop(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, rms: _Data, momentum: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, one_minus_decay: float, decay: float, epsilon_inside: float, epsilon_outside: float,
) -> None:  # fmt: skip
    """``rms += one_minus_decay (grad² - rms)``, and a step by ``√(rms + inside) + outside``."""
    _update_square(rms, grad, step, one_minus_decay)
    np.add(rms, epsilon_inside, out=by)
    _divide_by_sqrt(var, momentum, grad, step, by, lr, decay, epsilon_outside)


@_rule(num_scratch=2)
def rmsprop_centered(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, rms: _Data, mg: _Data, momentum: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, one_minus_decay: float, decay: float, epsilon_inside: float, epsilon_outside: float,
) -> None:  # fmt: skip
    """As RMSProp, with the mean ``mg`` of gradients, and ``rms - mg²`` under the root."""
    _update_square(rms, grad, step, one_minus_decay)
    np.subtract(grad, mg, out=step)
    np.multiply(step, one_minus_decay, out=step)
    np.add(mg, step, out=mg)
    np.multiply(mg, mg, out=by)
    np.subtract(rms, by, out=by)
    np.add(by, epsilon_inside, out=by)
    _divide_by_sqrt(var, momentum, grad, step, by, lr, decay, epsilon_outside)


def _update_square(square: _Data, grad: _Data, step: _Data, one_minus_decay: float) -> None:
    """``square += one_minus_decay (grad² - square)``."""
    np.multiply(grad, grad, out=step)
    np.subtract(step, square, out=step)
    np.multiply(step, one_minus_decay, out=step)
    np.add(square, step, out=square)


def _adam_step(  # noqa: PLR0913  # operands, scratch and scalars
    m: _Data, v: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, one_minus_beta1: float, one_minus_beta2: float, epsilon: float,
) -> None:  # fmt: skip
    """``m += one_minus_beta1 (grad - m)``, v likewise; ``step = lr m / (√v + epsilon)``."""
    np.subtract(grad, m, out=step)
    np.multiply(step, one_minus_beta1, out=step)
    np.add(m, step, out=m)
    _update_square(v, grad, step, one_minus_beta2)
    np.sqrt(v, out=by)
    np.add(by, epsilon, out=by)
    np.multiply(m, lr, out=step)
    np.true_divide(step, by, out=step)


def _divide_by_sqrt(  # noqa: PLR0913  # operands, scratch and scalars
    var: _Data, mom: _Data, grad: _Data, step: _Data, by: _Data,
    lr: float, decay: float, epsilon: float,
) -> None:  # fmt: skip
    """``mom = decay mom + lr grad / (√by + epsilon); var -= mom``."""
    np.sqrt(by, out=by)
    if epsilon != 0:  # as in TensorFlow: adding 0 would change nothing
        np.add(by, epsilon, out=by)
    np.multiply(grad, lr, out=step)
    np.true_divide(step, by, out=step)
    np.multiply(mom, decay, out=by)
    np.add(by, step, out=mom)
    np.subtract(var, mom, out=var)
