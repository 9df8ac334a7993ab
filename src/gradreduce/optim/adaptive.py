"""Rules that divide by the root of squares; each is a kernel of ``kernels/adaptive.cu``."""

from __future__ import annotations

import math
from typing import Any

from gradreduce.arrays.variable import Variable
from gradreduce.device import as_flag
from gradreduce.ops import RuleKernel
from gradreduce.ops.adaptive import ADAGRAD, ADAM, RMSPROP, RMSPROP_CENTERED

from .hyperparameters import Number, as_number, check_decay
from .optimizer import Optimizer

__all__ = ["AdagradOptimizer", "AdamOptimizer", "RMSPropOptimizer"]


class AdamOptimizer(Optimizer):
    """Adam (tf.train.AdamOptimizer).

    ``m += (1 - beta1) * (gradient - m)``, ``v += (1 - beta2) * (gradient ** 2 - v)``, then
    ``variable -= rate * m / (sqrt(v) + epsilon)`` with ``rate = learning_rate * sqrt(1 - p2) /
    (1 - p1)``. The slots ``"m"`` and ``"v"`` are zero at first. The powers p1 and p2 start at beta1
    and beta2, and each update multiplies them afterwards by these: one pair for the optimizer,
    whichever variables an update is of.

    Args:
        learning_rate: a number, or a callable or Variable that says it for each update; may be
            changed.
        beta1: decay of the first moment, at least 0 and below 1; likewise.
        beta2: decay of the second moment, at least 0 and below 1; likewise.
        epsilon: added to the root of the second moment; likewise.
        use_locking: TensorFlow's; no effect.
        name: of the optimizer.
        lazy: whether a sparse gradient touches only its rows. As TensorFlow's it counts else as
            zero in all others, whose moments decay and which move on.
        master_dtype: see ``Optimizer``.

    Raises:
        ValueError: a ``beta1`` or ``beta2`` that is none, now or when an update is asked for.
    """

    _slot_names = ("m", "v")
    _hyperparameters = ("learning_rate", "beta1", "beta2", "epsilon")

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
        self.beta1 = as_number("beta1", beta1)
        self.beta2 = as_number("beta2", beta2)
        self.epsilon = as_number("epsilon", epsilon)
        self._check_hyperparameters()
        self._densifies = not as_flag("lazy", lazy)
        self._powers: tuple[float, float] | None = None  # beta1 and beta2, until the first update
        self._betas = (0.0, 0.0)
        self._power_variables: tuple[Variable, ...] = ()

    @property
    def lazy(self) -> bool:
        """Whether a sparse gradient touches only its rows."""
        return not self._densifies

    def variables(self) -> list[Variable]:
        """Slots, and ``beta1_power`` and ``beta2_power`` as they are now, sorted by name.

        The powers are kept on the host, where an update wants them: what is assigned to their
        Variables is lost, ``load_state_dict`` sets them.
        """
        slots = super().variables()
        if not slots or self._powers is None:
            return slots
        if not self._power_variables:
            self._power_variables = tuple(
                Variable(power, name, trainable=False, dtype="float32", device=slots[0].devices[0])
                for power, name in zip(self._powers, ("beta1_power", "beta2_power"), strict=True)
            )
        for variable, power in zip(self._power_variables, self._powers, strict=True):
            variable.assign(power)
        return sorted([*self._power_variables, *slots], key=lambda each: each.name)

    @property
    def _kernel(self) -> RuleKernel:
        return ADAM

    _hyperparameter_names = ("beta1_power", "beta2_power")

    def _saved_hyperparameters(self) -> dict[str, float]:
        return dict(zip(self._hyperparameter_names, self._powers or (), strict=False))

    def _load_hyperparameters(self, numbers: dict[str, float]) -> None:
        power1, power2 = (numbers.get(name) for name in self._hyperparameter_names)
        self._powers = None if power1 is None or power2 is None else (power1, power2)

    def _check_hyperparameters(self) -> None:
        super()._check_hyperparameters()
        check_decay("beta1", as_number("beta1", self.beta1))
        check_decay("beta2", as_number("beta2", self.beta2))

    def _scalars(self) -> tuple[float, ...]:
        rate, beta1, beta2, epsilon = super()._scalars()
        check_decay("beta1", beta1)  # which a callable has said
        check_decay("beta2", beta2)
        self._betas = (beta1, beta2)
        power1, power2 = self._powers or self._betas
        corrected = rate * math.sqrt(1 - power2) / (1 - power1)
        return corrected, 1 - beta1, 1 - beta2, epsilon

    def _finish(self) -> None:
        power1, power2 = self._powers or self._betas
        self._powers = (power1 * self._betas[0], power2 * self._betas[1])


class AdagradOptimizer(Optimizer):
    """Adagrad (tf.train.AdagradOptimizer).

    ``accumulator += gradient ** 2``, then ``variable -= learning_rate * gradient /
    sqrt(accumulator)``. Rows that a sparse gradient does not name stay as they are.

    Args:
        learning_rate: a number, or a callable or Variable that says it for each update; may be
            changed.
        initial_accumulator_value: what the slot ``"accumulator"`` is filled with; above 0.
        use_locking: TensorFlow's; no effect.
        name: of the optimizer.
        master_dtype: see ``Optimizer``.

    Raises:
        ValueError: ``initial_accumulator_value`` is not above 0.
    """

    _slot_names = ("accumulator",)
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

    @property
    def _kernel(self) -> RuleKernel:
        return ADAGRAD


class RMSPropOptimizer(Optimizer):
    """RMSProp (tf.train.RMSPropOptimizer).

    ``rms += (1 - decay) * (gradient ** 2 - rms)``, ``mom = momentum * mom + learning_rate *
    gradient / sqrt(rms + epsilon)``, then ``variable -= mom``. The slot ``"rms"`` is one at first,
    ``"momentum"`` zero. Rows that a sparse gradient does not name stay as they are.

    Centered, it divides by the root of the variance: with the slot ``"mg"``, zero at first, ``mg +=
    (1 - decay) * (gradient - mg)``, and ``sqrt(rms - mg ** 2 + epsilon)`` below the gradient.

    Args:
        learning_rate: a number, or a callable or Variable that says it for each update; may be
            changed.
        decay: of the mean of squares; likewise.
        momentum: how much of the last step is made again; likewise.
        epsilon: added to the mean under the root; likewise.
        use_locking: TensorFlow's; no effect.
        centered: which of the two.
        name: of the optimizer.
        master_dtype: see ``Optimizer``.
    """

    _slot_names: tuple[str, ...] = ("rms", "momentum")
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
            self._slot_names = ("rms", "mg", "momentum")
        super().__init__(name, master_dtype=master_dtype)
        self.learning_rate = as_number("learning_rate", learning_rate)
        self.decay = as_number("decay", decay)
        self.momentum = as_number("momentum", momentum)
        self.epsilon = as_number("epsilon", epsilon)

    @property
    def centered(self) -> bool:
        """Whether it divides by the root of the variance."""
        return "mg" in self._slot_names

    def _slot_start(self, name: str) -> float:
        return 1.0 if name == "rms" else 0.0

    @property
    def _kernel(self) -> RuleKernel:
        return RMSPROP_CENTERED if self.centered else RMSPROP

    def _scalars(self) -> tuple[float, ...]:
        rate, decay, momentum, epsilon = super()._scalars()
        return rate, 1 - decay, momentum, epsilon
