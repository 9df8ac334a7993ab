"""The update rules by NumPy's operators, as the headers of ``update.cu`` and ``adaptive.cu``."""

from __future__ import annotations

import numpy as np

# Each operator rounds once. Every array and scalar comes in the accumulate type; what is returned
# is rounded to the dtype at the end.


def sgd_rule(var, grad, rate):
    return [var - rate * grad]


def momentum_rule(var, mom, grad, rate, decay):
    mom = decay * mom + grad
    return [var - rate * mom, mom]


def nesterov_rule(var, mom, grad, rate, decay):
    mom = decay * mom + grad
    return [var - (rate * grad + rate * decay * mom), mom]


def adam_rule(  # noqa: PLR0913  # operands and scalars
    var, mom, square, grad, rate, rest1, rest2, epsilon
):
    mom = mom + rest1 * (grad - mom)
    square = square + rest2 * (grad * grad - square)
    return [var - rate * mom / (np.sqrt(square) + epsilon), mom, square]


def adagrad_rule(var, total, grad, rate):
    total = total + grad * grad
    return [var - rate * grad / np.sqrt(total), total]


def rmsprop_rule(  # noqa: PLR0913  # operands and scalars
    var, square, mom, grad, rate, rest, decay, epsilon
):
    square = square + rest * (grad * grad - square)
    mom = decay * mom + rate * grad / np.sqrt(square + epsilon)
    return [var - mom, square, mom]


def rmsprop_centered_rule(  # noqa: PLR0913  # operands and scalars
    var, square, mean, mom, grad, rate, rest, decay, epsilon
):
    square = square + rest * (grad * grad - square)
    mean = mean + rest * (grad - mean)
    mom = decay * mom + rate * grad / np.sqrt(square - mean * mean + epsilon)
    return [var - mom, square, mean, mom]


# All of them: the formula, how many slots it has, and scalars that no float has exactly.
FORMULAS = {
    "sgd": (sgd_rule, 0, (0.1,)),
    "momentum": (momentum_rule, 1, (0.1, 0.9)),
    "nesterov": (nesterov_rule, 1, (0.1, 0.9)),
    "adam": (adam_rule, 2, (0.1, 0.3, 0.1, 0.01)),
    "adagrad": (adagrad_rule, 1, (0.1,)),
    "rmsprop": (rmsprop_rule, 2, (0.1, 0.3, 0.9, 0.01)),
    "rmsprop_centered": (rmsprop_centered_rule, 3, (0.1, 0.3, 0.9, 0.01)),
}


def master_or_variable(var, master):
    """What an update starts from, in the type of the master, where there is one."""
    return np.where(master.astype(var.dtype) == var, master, var.astype(master.dtype))
