"""Optimizers: gradient descent, momentum, Adam, AdamW, Lion, Adagrad and RMSProp."""

from __future__ import annotations

import math
from typing import Any, Literal

from gradreduce.arrays.variable import Variable
from gradreduce.device import as_flag
from gradreduce.errors import brief
from gradreduce.ops import UpdateRule, update_rules

from .hyperparameters import Number, refuses_pytorch
from .optimizer import Optimizer, Scalars


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


def _is_torch(eps_mode: str) -> bool:
    """Validates ``eps_mode``; returns whether epsilon is added where PyTorch adds it."""
    if eps_mode not in ("tensorflow", "torch"):
        raise ValueError(f"eps_mode={brief(eps_mode)} must be 'tensorflow' or 'torch'")
    return eps_mode == "torch"


class _DecayingOptimizer(Optimizer):
    """Base of rules that change a variable even where its gradient is zero."""

    _constants = ("lazy",)

    def __init__(self, name: str, *, lazy: bool, master_dtype: Any) -> None:
        super().__init__(name, master_dtype=master_dtype)
        self._densifies = not as_flag("lazy", lazy)

    @property
    def lazy(self) -> bool:
        """Whether a sparse gradient updates only its rows; set by the constructor."""
        return not self._densifies


class AdamOptimizer(_DecayingOptimizer):
    """Adam optimizer (tf.train.AdamOptimizer).

    ``m += (1 - beta1) * (gradient - m)``, ``v += (1 - beta2) * (gradient ** 2 - v)``, then
    ``variable -= lr * m / (sqrt(v) + epsilon)`` with ``lr = learning_rate * sqrt(1 - p2) / (1 -
    p1)``. The slots ``"m"`` and ``"v"`` start at zero. The powers p1 and p2 start at beta1 and
    beta2; after each update they are multiplied by beta1 and beta2. All variables of the optimizer
    share these powers.

    ``learning_rate``, ``beta1``, ``beta2`` and ``epsilon`` are numbers, or callables or Variables
    that are read at each update. They can be set later, as attributes.

    Args:
        learning_rate: see above.
        beta1: decay of the first moment, at least 0 and below 1.
        beta2: decay of the second moment, at least 0 and below 1.
        epsilon: see ``eps_mode``.
        use_locking: no effect; for compatibility with TensorFlow.
        name: name of the optimizer.
        lazy: whether a sparse gradient updates only its rows. If False, as in TensorFlow, the
            gradient is zero in all other rows: their moments decay, and the rows change too.
        master_dtype: see ``Optimizer``.
        eps_mode: ``"tensorflow"`` adds epsilon to ``sqrt(v)``, as above. ``"torch"`` adds it to
            ``sqrt(v / (1 - p2))``, as torch.optim.Adam does. Can be set later.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number, ``beta1`` or ``beta2`` is out of
            range, or ``eps_mode`` is unknown; or see ``Optimizer``. An update raises them too, if
            these were set later or are callables or Variables.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([1, -1]), "w", device=mesh)
        >>> optimizer = gr.AdamOptimizer(learning_rate=0.5)
        >>> optimizer.apply_gradients([(np.float32([4, -4]), w)])
        >>> w.numpy().round(3)  # the first step has the size of the learning rate
        array([ 0.5, -0.5], dtype=float32)
        >>> optimizer.get_slot_names()
        ['m', 'v']
    """

    _rule = update_rules.adam
    _settings = ("eps_mode",)
    _decays = ("beta1", "beta2")
    _power_names = ("beta1_power", "beta2_power")

    @refuses_pytorch(weight_decay="use gr.AdamWOptimizer, which decays the variables themselves")
    def __init__(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        learning_rate: Number = 0.001,
        beta1: Number = 0.9,
        beta2: Number = 0.999,
        epsilon: Number = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        *,
        lazy: bool = False,
        master_dtype: Any = None,
        eps_mode: Literal["tensorflow", "torch"] = "tensorflow",
    ) -> None:
        super().__init__(name, lazy=lazy, master_dtype=master_dtype)
        self._set_numbers(learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon)
        _is_torch(eps_mode)
        self.eps_mode = eps_mode

    def variables(self) -> list[Variable]:
        """Returns the slots, ``beta1_power`` and ``beta2_power``, sorted by name.

        The Variables of the two powers are copies. To change the powers, use ``load_state_dict``.
        """
        slots = super().variables()
        powers = [
            Variable(power, name, trainable=False, dtype="float32", device=slots[0].devices[0])
            for name, power in zip(self._power_names, self._slots.powers, strict=False)
            if slots
        ]
        return sorted([*powers, *slots], key=lambda each: each.name)

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        (lr, beta1, beta2, epsilon, *weight_decay), _ = super()._next_update(powers)
        power1, power2 = powers or (beta1, beta2)
        correction = math.sqrt(1 - power2)
        epsilon *= correction if _is_torch(self.eps_mode) else 1
        scalars = (
            lr * correction / (1 - power1),
            1 - beta1,
            1 - beta2,
            epsilon,
            *[1 - lr * each for each in weight_decay],  # AdamW has one
        )
        return scalars, (power1 * beta1, power2 * beta2)


class AdamWOptimizer(AdamOptimizer):
    """Adam with decoupled weight decay (torch.optim.AdamW).

    ``variable *= 1 - learning_rate * weight_decay``, then the step of ``AdamOptimizer`` with
    PyTorch's epsilon: ``variable -= learning_rate / (1 - p1) * m / (sqrt(v / (1 - p2)) +
    epsilon)``.

    Hyperparameters are numbers, or callables or Variables that are read at each update. They can be
    set later, as attributes.

    Args:
        learning_rate: see above.
        beta1: decay of the first moment, at least 0 and below 1.
        beta2: decay of the second moment, at least 0 and below 1.
        epsilon: see above.
        weight_decay: an update subtracts this fraction of a variable, times the learning rate.
        name: name of the optimizer.
        lazy: whether a sparse gradient updates only its rows, so that only these rows decay. If
            False, the gradient is zero in all other rows, and all rows decay.
        master_dtype: see ``Optimizer``.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number, or ``beta1`` or ``beta2`` is out of
            range; or see ``Optimizer``. An update raises them too, if these were set later or are
            callables or Variables.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([4, 4]), "w", device=mesh)
        >>> optimizer = gr.AdamWOptimizer(learning_rate=0.5, weight_decay=0.5)
        >>> optimizer.apply_gradients([(np.float32([4, 0]), w)])
        >>> w.numpy().round(3)  # decay to 3, then a step of -0.5 where there is a gradient
        array([2.5, 3. ], dtype=float32)
    """

    _rule = update_rules.adamw

    @refuses_pytorch()
    def __init__(  # noqa: PLR0913  # the arguments of PyTorch
        self,
        learning_rate: Number = 0.001,
        beta1: Number = 0.9,
        beta2: Number = 0.999,
        epsilon: Number = 1e-8,
        weight_decay: Number = 0.01,
        name: str = "AdamW",
        *,
        lazy: bool = False,
        master_dtype: Any = None,
    ) -> None:
        super().__init__(
            learning_rate,
            beta1,
            beta2,
            epsilon,
            name=name,
            lazy=lazy,
            master_dtype=master_dtype,
            eps_mode="torch",
        )
        self._set_numbers(weight_decay=weight_decay)


class LionOptimizer(_DecayingOptimizer):
    """Lion: the sign of a moving mean, with decoupled weight decay (arXiv:2302.06675).

    ``variable *= 1 - learning_rate * weight_decay``, ``variable -= learning_rate * sign(beta1 * m +
    (1 - beta1) * gradient)``, then ``m = beta2 * m + (1 - beta2) * gradient``. ``m`` is the only
    slot; it starts at zero. An update moves each element by the learning rate. Therefore the paper
    recommends a learning rate that is 3 to 10 times smaller than AdamW's, and a weight decay that
    is 3 to 10 times larger.

    Hyperparameters are numbers, or callables or Variables that are read at each update. They can be
    set later, as attributes.

    Args:
        learning_rate: see above.
        beta1: decay of the mean whose sign is used, at least 0 and below 1.
        beta2: decay of the mean that the slot keeps, at least 0 and below 1.
        weight_decay: an update subtracts this fraction of a variable, times the learning rate.
        name: name of the optimizer.
        lazy: see ``AdamWOptimizer``.
        master_dtype: see ``Optimizer``.

    Raises:
        TypeError, ValueError: a hyperparameter is not a number, or ``beta1`` or ``beta2`` is out of
            range; or see ``Optimizer``. An update raises them too, if these were set later or are
            callables or Variables.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([1, 1]), "w", device=mesh)
        >>> optimizer = gr.LionOptimizer(learning_rate=0.25)
        >>> optimizer.apply_gradients([(np.float32([4, -0.1]), w)])
        >>> w.numpy()
        array([0.75, 1.25], dtype=float32)
    """

    _rule = update_rules.lion
    _decays = ("beta1", "beta2")

    @refuses_pytorch()
    def __init__(
        self,
        learning_rate: Number = 1e-4,
        beta1: Number = 0.9,
        beta2: Number = 0.99,
        weight_decay: Number = 0.0,
        name: str = "Lion",
        *,
        lazy: bool = False,
        master_dtype: Any = None,
    ) -> None:
        super().__init__(name, lazy=lazy, master_dtype=master_dtype)
        self._set_numbers(
            learning_rate=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay
        )

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        (lr, beta1, beta2, weight_decay), powers = super()._next_update(powers)
        return (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay), powers


class AdagradOptimizer(Optimizer):
    """Adagrad optimizer (tf.train.AdagradOptimizer).

    ``accumulator += gradient ** 2``, then ``variable -= learning_rate * gradient /
    sqrt(accumulator)``. A sparse gradient updates only its rows.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update. It can be
            set later, as an attribute.
        initial_accumulator_value: initial value of the slot ``"accumulator"``; above 0.
        use_locking: no effect; for compatibility with TensorFlow.
        name: name of the optimizer.
        master_dtype: see ``Optimizer``.

    Raises:
        ValueError: ``initial_accumulator_value`` is not above 0.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([1]), "w", device=mesh)
        >>> optimizer = gr.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=7.0)
        >>> optimizer.apply_gradients([(np.float32([3]), w)])
        >>> w.numpy()  # 1 - 0.5 * 3 / sqrt(7 + 9)
        array([0.625], dtype=float32)
    """

    _rule = update_rules.adagrad
    _settings = ("initial_accumulator_value",)

    @refuses_pytorch()
    def __init__(
        self,
        learning_rate: Number,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
        *,
        master_dtype: Any = None,
    ) -> None:
        super().__init__(name, master_dtype=master_dtype)
        if not float(initial_accumulator_value) > 0:
            raise ValueError(
                f"initial_accumulator_value must be positive: {initial_accumulator_value}"
            )
        self._set_numbers(learning_rate=learning_rate)
        self.initial_accumulator_value = float(initial_accumulator_value)

    def _slot_start(self, name: str) -> float:
        return self.initial_accumulator_value


class RMSPropOptimizer(Optimizer):
    """RMSProp optimizer (tf.train.RMSPropOptimizer).

    ``rms += (1 - decay) * (gradient ** 2 - rms)``, ``mom = momentum * mom + learning_rate *
    gradient / sqrt(rms + epsilon)``, then ``variable -= mom``. The slot ``"rms"`` starts at one,
    the slot ``"momentum"`` at zero. A sparse gradient updates only its rows.

    With ``centered``, the gradient is divided by its standard deviation: ``mg += (1 - decay) *
    (gradient - mg)``, and the divisor is ``sqrt(rms - mg ** 2 + epsilon)``. The slot ``"mg"``
    starts at zero.

    ``learning_rate``, ``decay``, ``momentum`` and ``epsilon`` are numbers, or callables or
    Variables that are read at each update. They can be set later, as attributes.

    Args:
        learning_rate: see above.
        decay: decay of the mean of squares.
        momentum: fraction of the previous step that is added.
        epsilon: see ``eps_mode``.
        use_locking: no effect; for compatibility with TensorFlow.
        centered: see above.
        name: name of the optimizer.
        master_dtype: see ``Optimizer``.
        eps_mode: ``"tensorflow"`` adds epsilon inside the square root, as above. ``"torch"`` adds
            it to the square root, and ``"rms"`` starts at zero. Then a step equals that of
            torch.optim.RMSprop with ``alpha=decay``, if the learning rate is constant. If it
            changes, the steps differ: PyTorch multiplies the momentum by the current learning rate,
            and this optimizer multiplies each gradient by the rate of its own step. Can be set
            later; existing slots keep their values.

    Raises:
        ValueError: ``eps_mode`` is unknown. An update raises it too, if it was set later.

    Example:
        >>> mesh = gr.open_mesh(1, backend="sim")
        >>> w = gr.Variable(np.float32([1]), "w", device=mesh)
        >>> optimizer = gr.RMSPropOptimizer(learning_rate=0.5, decay=0.5)
        >>> optimizer.apply_gradients([(np.float32([1]), w)])
        >>> w.numpy()  # rms stays 1, so the step is 0.5 * 1 / 1
        array([0.5], dtype=float32)
    """

    _rule = update_rules.rmsprop
    _settings = ("eps_mode",)
    _constants = ("centered",)

    @refuses_pytorch()
    def __init__(  # noqa: PLR0913  # the signature of TensorFlow
        self,
        learning_rate: Number,
        decay: Number = 0.9,
        momentum: Number = 0.0,
        epsilon: Number = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
        *,
        master_dtype: Any = None,
        eps_mode: Literal["tensorflow", "torch"] = "tensorflow",
    ) -> None:
        if as_flag("centered", centered):
            self._rule = update_rules.rmsprop_centered
        super().__init__(name, master_dtype=master_dtype)
        self._set_numbers(
            learning_rate=learning_rate, decay=decay, momentum=momentum, epsilon=epsilon
        )
        _is_torch(eps_mode)
        self.eps_mode = eps_mode

    @property
    def centered(self) -> bool:
        """Whether gradients are divided by their standard deviation; set by the constructor."""
        return self._rule is update_rules.rmsprop_centered

    def _slot_start(self, name: str) -> float:
        return 1.0 if name == "rms" and not _is_torch(self.eps_mode) else 0.0

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        (lr, decay, momentum, epsilon), powers = super()._next_update(powers)
        epsilons = (0.0, epsilon) if _is_torch(self.eps_mode) else (epsilon, 0.0)
        return (lr, 1 - decay, momentum, *epsilons), powers
