"""Gradient descent with and without momentum."""

from __future__ import annotations

from typing import Any

from gradreduce.device import as_flag
from gradreduce.ops import UpdateRule, update_rules

from .hyperparameters import Number
from .optimizer import Optimizer


class GradientDescentOptimizer(Optimizer):
    """Gradient descent optimizer (tf.train.GradientDescentOptimizer).

    ``variable -= learning_rate * gradient``.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update; can be
            set later.
        use_locking: no effect; for compatibility with TensorFlow.
        name: of the optimizer.
        master_dtype: see ``Optimizer``.
    """

    _rule = update_rules.sgd

    def __init__(
        self,
        learning_rate: Number,
        use_locking: bool = False,
        name: str = "GradientDescent",
        *,
        master_dtype: Any = None,
    ) -> None:
        super().__init__(name, master_dtype=master_dtype)
        self._set_numbers(learning_rate=learning_rate)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum (tf.train.MomentumOptimizer).

    ``moment = momentum * moment + gradient``, then ``variable -= learning_rate * moment``; with
    Nesterov ``variable -= learning_rate * gradient + learning_rate * momentum * moment``. The
    moment is the slot ``"momentum"``, which starts at zero, on the variable's devices. A sparse
    gradient updates only its rows, and their moment.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update; can be
            set later.
        momentum: likewise.
        use_locking: no effect; for compatibility with TensorFlow.
        name: of the optimizer.
        use_nesterov: whether to use Nesterov's momentum; can be set later.
        master_dtype: see ``Optimizer``.
    """

    _settings = ("use_nesterov",)

    def __init__(
        self,
        learning_rate: Number,
        momentum: Number,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
        *,
        master_dtype: Any = None,
    ) -> None:
        self.use_nesterov = as_flag("use_nesterov", use_nesterov)
        super().__init__(name, master_dtype=master_dtype)
        self._set_numbers(learning_rate=learning_rate, momentum=momentum)

    @property
    def _rule(self) -> UpdateRule:  # type: ignore[override]  # use_nesterov can be set
        return update_rules.nesterov if self.use_nesterov else update_rules.momentum
