"""Adam, Adagrad and RMSProp."""

from __future__ import annotations

import math
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import as_flag
from gradreduce.ops import update_rules

from .hyperparameters import Number, as_number
from .optimizer import Optimizer, Scalars


class AdamOptimizer(Optimizer):
    """Adam optimizer (tf.train.AdamOptimizer).

    ``m += (1 - beta1) * (gradient - m)``, ``v += (1 - beta2) * (gradient ** 2 - v)``, then
    ``variable -= lr * m / (sqrt(v) + epsilon)`` with ``lr = learning_rate * sqrt(1 - p2) / (1 -
    p1)``. The slots ``"m"`` and ``"v"`` start at zero. The powers p1 and p2 start at beta1 and
    beta2; each update multiplies them by beta1 and beta2 afterwards. There is one pair for the
    optimizer, whichever variables an update has.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update; can be
            set later.
        beta1: decay of the first moment, at least 0 and below 1; likewise.
        beta2: decay of the second moment, at least 0 and below 1; likewise.
        epsilon: added to the square root of the second moment; likewise.
        use_locking: no effect; for compatibility with TensorFlow.
        name: of the optimizer.
        lazy: whether a sparse gradient updates only its rows. If not, as in TensorFlow, it counts
            as zero in all other rows, whose moments decay and which change too.
        master_dtype: see ``Optimizer``.

    Raises:
        ValueError: ``beta1`` or ``beta2`` is out of range, here or at an update.
    """

    _rule = update_rules.adam
    _hyperparameters = ("learning_rate", "beta1", "beta2", "epsilon")
    _decays = ("beta1", "beta2")
    _power_names = ("beta1_power", "beta2_power")

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
    ) -> None:
        super().__init__(name, master_dtype=master_dtype)
        self.learning_rate = as_number("learning_rate", learning_rate)
        self.beta1 = as_number("beta1", beta1, is_decay=True)
        self.beta2 = as_number("beta2", beta2, is_decay=True)
        self.epsilon = as_number("epsilon", epsilon)
        self._densifies = not as_flag("lazy", lazy)

    @property
    def lazy(self) -> bool:
        """Whether a sparse gradient updates only its rows."""
        return not self._densifies

    def variables(self) -> list[Variable]:
        """Returns the slots, ``beta1_power`` and ``beta2_power``, sorted by name.

        The powers are stored on the host, and their Variables are copies: to set them, use
        ``load_state_dict``.
        """
        slots = super().variables()
        powers = [
            Variable(power, name, trainable=False, dtype="float32", device=slots[0].devices[0])
            for name, power in zip(self._power_names, self._slots.powers, strict=False)
            if slots
        ]
        return sorted([*powers, *slots], key=lambda each: each.name)

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        (lr, beta1, beta2, epsilon), _ = super()._next_update(powers)
        power1, power2 = powers or (beta1, beta2)
        corrected = lr * math.sqrt(1 - power2) / (1 - power1)
        return (corrected, 1 - beta1, 1 - beta2, epsilon), (power1 * beta1, power2 * beta2)


class AdagradOptimizer(Optimizer):
    """Adagrad optimizer (tf.train.AdagradOptimizer).

    ``accumulator += gradient ** 2``, then ``variable -= learning_rate * gradient /
    sqrt(accumulator)``. A sparse gradient updates only its rows.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update; can be
            set later.
        initial_accumulator_value: initial value of the slot ``"accumulator"``; above 0.
        use_locking: no effect; for compatibility with TensorFlow.
        name: of the optimizer.
        master_dtype: see ``Optimizer``.

    Raises:
        ValueError: ``initial_accumulator_value`` is not above 0.
    """

    _rule = update_rules.adagrad
    _hyperparameters = ("learning_rate",)
    _settings = ("initial_accumulator_value",)

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
        self.learning_rate = as_number("learning_rate", learning_rate)
        self.initial_accumulator_value = float(initial_accumulator_value)

    def _slot_start(self, name: str) -> float:
        return self.initial_accumulator_value


class RMSPropOptimizer(Optimizer):
    """RMSProp optimizer (tf.train.RMSPropOptimizer).

    ``rms += (1 - decay) * (gradient ** 2 - rms)``, ``mom = momentum * mom + learning_rate *
    gradient / sqrt(rms + epsilon)``, then ``variable -= mom``. The slot ``"rms"`` starts at
    one, ``"momentum"`` at zero. A sparse gradient updates only its rows.

    If centered, it divides by the standard deviation: with the slot ``"mg"``, which starts at zero,
    ``mg += (1 - decay) * (gradient - mg)``, and the divisor is ``sqrt(rms - mg ** 2 + epsilon)``.

    Args:
        learning_rate: a number, or a callable or Variable that is read at each update; can be
            set later.
        decay: of the mean of squares; likewise.
        momentum: fraction of the previous step that is added; likewise.
        epsilon: added under the square root; likewise.
        use_locking: no effect; for compatibility with TensorFlow.
        centered: whether to divide by the standard deviation.
        name: of the optimizer.
        master_dtype: see ``Optimizer``.
    """

    _rule = update_rules.rmsprop
    _hyperparameters = ("learning_rate", "decay", "momentum", "epsilon")

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
    ) -> None:
        if as_flag("centered", centered):
            self._rule = update_rules.rmsprop_centered
        super().__init__(name, master_dtype=master_dtype)
        self.learning_rate = as_number("learning_rate", learning_rate)
        self.decay = as_number("decay", decay)
        self.momentum = as_number("momentum", momentum)
        self.epsilon = as_number("epsilon", epsilon)

    @property
    def centered(self) -> bool:
        """Whether it divides by the standard deviation of the gradients."""
        return self._rule is update_rules.rmsprop_centered

    def _slot_start(self, name: str) -> float:
        return 1.0 if name == "rms" else 0.0

    def _next_update(self, powers: Scalars) -> tuple[Scalars, Scalars]:
        (lr, decay, momentum, epsilon), powers = super()._next_update(powers)
        return (lr, 1 - decay, momentum, epsilon), powers
