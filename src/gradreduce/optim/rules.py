"""The update rules; each is one kernel of ``kernels/update.cu``."""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce import ops
from gradreduce.device import Buffer, Device, DType

from .base import Optimizer

__all__ = ["AdamOptimizer", "GradientDescentOptimizer", "MomentumOptimizer"]


class GradientDescentOptimizer(Optimizer):
    """``variable -= learning_rate * gradient`` (tf.train.GradientDescentOptimizer).

    Args:
        learning_rate: a number.
        name: of the optimizer.
    """

    def __init__(self, learning_rate: float, name: str = "GradientDescent") -> None:
        super().__init__(name)
        self.learning_rate = float(learning_rate)

    def _prepare(self, device: Device, dtype: DType) -> None:
        float(self.learning_rate)  # a caller may have set it to anything: fail before, not after
        ops.prepare_update("sgd", device, dtype)

    def _update(
        self,
        variables: Sequence[Buffer],
        slots: Sequence[Sequence[Buffer]],
        gradients: Sequence[Buffer],
        device: Device,
    ) -> None:
        ops.sgd(variables, gradients, rate=self.learning_rate, device=device)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum (tf.train.MomentumOptimizer).

    ``moment = momentum * moment + gradient``, then ``variable -= learning_rate * moment``; with
    Nesterov ``variable -= learning_rate * gradient + learning_rate * momentum * moment``. The
    moment is the slot ``"momentum"``, zero at first, on the variable's devices.

    Args:
        learning_rate: a number; may be changed between steps.
        momentum: a number; may be changed between steps.
        use_nesterov: which of the two.
        name: of the optimizer.
    """

    _slot_names = ("momentum",)

    def __init__(
        self,
        learning_rate: float,
        momentum: float,
        use_nesterov: bool = False,
        name: str = "Momentum",
    ) -> None:
        super().__init__(name)
        self.learning_rate = float(learning_rate)
        self.momentum = float(momentum)
        self.use_nesterov = bool(use_nesterov)

    def _prepare(self, device: Device, dtype: DType) -> None:
        float(self.learning_rate), float(self.momentum)  # fail before an update, not in it
        ops.prepare_update("nesterov" if self.use_nesterov else "momentum", device, dtype)

    def _update(
        self,
        variables: Sequence[Buffer],
        slots: Sequence[Sequence[Buffer]],
        gradients: Sequence[Buffer],
        device: Device,
    ) -> None:
        rule = ops.nesterov if self.use_nesterov else ops.momentum
        rule(
            variables, slots[0], gradients,
            rate=self.learning_rate, decay=self.momentum, device=device,
        )  # fmt: skip


class AdamOptimizer(Optimizer):
    """Adam (tf.train.AdamOptimizer).

    Args:
        learning_rate: a number.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        name: of the optimizer.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        name: str = "Adam",
    ) -> None:
        raise NotImplementedError("AdamOptimizer is not implemented yet")
