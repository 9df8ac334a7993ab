"""Gradient descent with and without momentum."""

from __future__ import annotations

from typing import Any

from gradreduce.device import as_flag
from gradreduce.ops import UpdateRule, update_rules

from .hyperparameters import Number, refuses_pytorch
from .optimizer import Optimizer


class GradientDescentOptimizer(Optimizer):
    """Gradient descent optimizer (tf.train.GradientDescentOptimizer).

    ``variable -= learning_rate * gradient``.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update. It can be
            set later, as an attribute.
        use_locking: no effect; for compatibility with TensorFlow.
        name: name of the optimizer.
        master_dtype: see ``Optimizer``.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number; or see ``Optimizer``.

    Example:
        >>> mesh = gr.open_mesh(2, backend="sim")
        >>> w = gr.Variable(np.float32([1, 2]), "w", device=mesh)
        >>> optimizer = gr.GradientDescentOptimizer(learning_rate=0.5)
        >>> optimizer.minimize(lambda: np.sum(3 * w))
        >>> w.numpy()
        array([-0.5,  0.5], dtype=float32)
        >>> optimizer.learning_rate = 0.25  # for the next updates
    """

    _rule = update_rules.sgd

    @refuses_pytorch(
        momentum="use gr.MomentumOptimizer",
        nesterov="use gr.MomentumOptimizer, and pass use_nesterov=",
    )
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

    ``moment = momentum * moment + gradient``, then ``variable -= learning_rate * moment``, or, with
    ``use_nesterov``, ``variable -= learning_rate * gradient + learning_rate * momentum * moment``.
    The moment is the slot ``"momentum"``, which starts at zero. A sparse gradient updates only its
    rows of the variable and of the moment.

    ``learning_rate`` and ``momentum`` are numbers, or callables or Variables that are read at each
    update. They can be set later, as attributes.

    Args:
        learning_rate: see above.
        momentum: see above; the fraction of the moment that an update keeps.
        use_locking: no effect; for compatibility with TensorFlow.
        name: name of the optimizer.
        use_nesterov: whether to use Nesterov's momentum; can be set later.
        master_dtype: see ``Optimizer``.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number; or see ``Optimizer``.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([8]), "w", device=mesh)
        >>> optimizer = gr.MomentumOptimizer(learning_rate=1.0, momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([(np.float32([1]), w)])
        >>> w.numpy()  # 8 - 1 - 1.5
        array([5.5], dtype=float32)
        >>> optimizer.get_slot(w, "momentum").numpy()
        array([1.5], dtype=float32)
    """

    _settings = ("use_nesterov",)

    @refuses_pytorch()
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
