"""The update rules in NumPy's operators, as in ``rules.cuh``."""

import numpy as np

# Each operator rounds once. Arrays and scalars are in the accumulate type; the caller rounds the
# results to the dtype.


def sgd_rule(var, grad, lr):
    return [var - lr * grad]


def momentum_rule(var, mom, grad, lr, decay):
    mom = decay * mom + grad
    return [var - lr * mom, mom]


def nesterov_rule(var, mom, grad, lr, decay):
    mom = decay * mom + grad
    return [var - (lr * grad + lr * decay * mom), mom]


def delayed_nesterov_rule(  # noqa: PLR0913  # operands and scalars
    var, mom, delayed, grad, lr_each, lr, decay, num_pushes, is_last
):
    delayed = delayed + grad
    if not is_last:
        return [var - lr_each * grad, mom, delayed]
    mom = decay * mom + delayed / num_pushes
    return [var - (lr_each * grad + lr * decay * mom), mom, np.zeros_like(delayed)]


def adam_rule(  # noqa: PLR0913  # operands and scalars
    var, mom, square, grad, lr, one_minus_beta1, one_minus_beta2, epsilon
):
    mom = mom + one_minus_beta1 * (grad - mom)
    square = square + one_minus_beta2 * (grad * grad - square)
    return [var - lr * mom / (np.sqrt(square) + epsilon), mom, square]


def adamw_rule(  # noqa: PLR0913  # operands and scalars
    var, mom, square, grad, lr, one_minus_beta1, one_minus_beta2, epsilon, scale
):
    mom = mom + one_minus_beta1 * (grad - mom)
    square = square + one_minus_beta2 * (grad * grad - square)
    return [scale * var - lr * mom / (np.sqrt(square) + epsilon), mom, square]


def lion_rule(  # noqa: PLR0913  # operands and scalars
    var, mom, grad, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, scale
):
    sign = np.sign(beta1 * mom + one_minus_beta1 * grad)
    return [scale * var - lr * sign, beta2 * mom + one_minus_beta2 * grad]


def adagrad_rule(var, total, grad, lr):
    total = total + grad * grad
    return [var - lr * grad / np.sqrt(total), total]


def rmsprop_rule(  # noqa: PLR0913  # operands and scalars
    var, square, mom, grad, lr, one_minus_decay, decay, inside, outside
):
    square = square + one_minus_decay * (grad * grad - square)
    mom = decay * mom + lr * grad / (np.sqrt(square + inside) + outside)
    return [var - mom, square, mom]


def rmsprop_centered_rule(  # noqa: PLR0913  # operands and scalars
    var, square, mean, mom, grad, lr, one_minus_decay, decay, inside, outside
):
    square = square + one_minus_decay * (grad * grad - square)
    mean = mean + one_minus_decay * (grad - mean)
    mom = decay * mom + lr * grad / (np.sqrt(square - mean * mean + inside) + outside)
    return [var - mom, square, mean, mom]


# Per rule: the formula, the number of slots, and scalars that no float represents exactly.
FORMULAS = {
    "sgd": (sgd_rule, 0, (0.1,)),
    "momentum": (momentum_rule, 1, (0.1, 0.9)),
    "nesterov": (nesterov_rule, 1, (0.1, 0.9)),
    "delayed_nesterov": (delayed_nesterov_rule, 2, (0.03, 0.1, 0.9, 3.0, 1.0)),
    "adam": (adam_rule, 2, (0.1, 0.3, 0.1, 0.01)),
    "adamw": (adamw_rule, 2, (0.1, 0.3, 0.1, 0.01, 0.7)),
    "lion": (lion_rule, 1, (0.1, 0.9, 0.1, 0.7, 0.3, 0.7)),
    "adagrad": (adagrad_rule, 1, (0.1,)),
    "rmsprop": (rmsprop_rule, 2, (0.1, 0.3, 0.9, 0.01, 0.003)),
    "rmsprop_centered": (rmsprop_centered_rule, 3, (0.1, 0.3, 0.9, 0.01, 0.003)),
}


def master_or_variable(var, master):
    """The start of an update: the master where it matches the variable, else the variable."""
    return np.where(master.astype(var.dtype) == var, master, var.astype(master.dtype))
