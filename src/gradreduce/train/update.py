"""The last stages of a ``SyncStep`` in which every replica updates its copies of all variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from gradreduce.accumulator.multi import reduce_now
from gradreduce.accumulator.state import AccumulatorState
from gradreduce.accumulator.take_queue import take_sums
from gradreduce.arrays.distributed import Mirrored, buffer_of
from gradreduce.arrays.variable import Variable
from gradreduce.comm.replicas import abort_others_on_error
from gradreduce.optim import Optimizer

from .scaling import GradientScaling


class UpdateStages(Protocol):
    """The stages of a step after its accumulators; see ``ReplicatedUpdate``."""

    variables: tuple[Variable, ...]

    def reduce(self, states: Sequence[AccumulatorState], num_required: int) -> Any:
        """Takes the sums and reduces them to means; None if there are not enough gradients.

        Args:
            states: the accumulator of each variable.
            num_required: the number of gradients that a sum must have.
        """

    def scale(self, means: Any) -> bool:
        """Unscales and clips the means in place; returns False to skip the update."""

    def apply(self, means: Any) -> None:
        """Updates the variables."""


_Means = Sequence[Mirrored | None]  # for each variable; None for one without a gradient


class ReplicatedUpdate:
    """Reduces the sums to every replica, scales the means, and updates all copies.

    Args:
        variables: the variables of the step.
        sparse: the indices of those with sparse gradients.
        optimizer: updates the variables.
        scaling: scales the mean gradients.

    Attributes:
        variables: the Variables that the optimizer updates.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        sparse: Collection[int],
        optimizer: Optimizer,
        scaling: GradientScaling,
    ) -> None:
        self.variables = tuple(variables)
        self._optimizer, self._scaling = optimizer, scaling
        optimizer._rehearse_update([variables[index] for index in sparse], sparse=True)

    def reduce(self, states: Sequence[AccumulatorState], num_required: int) -> _Means | None:
        """See ``UpdateStages``."""
        taken = reduce_now(states, num_required, take_sums)  # pack, all-reduce, unpack
        if taken is None:
            return None
        return [Mirrored.of(taken[state][0]) if state in taken else None for state in states]

    def scale(self, means: _Means) -> bool:
        """See ``UpdateStages``."""
        rows = [list(map(buffer_of, mean.parts)) for mean in means if mean is not None]
        with abort_others_on_error(self.variables[0].devices[0]):
            return self._scaling.apply(list(zip(*rows, strict=True)))

    def apply(self, means: _Means) -> None:
        """See ``UpdateStages``."""
        self._optimizer.apply_gradients(list(zip(means, self.variables, strict=True)))
