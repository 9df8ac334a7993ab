"""The weight of a local step, of which each replica of the worker has a part."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradreduce.accumulator.validate import as_weights
from gradreduce.weights import ONE, from_units, sum_weights


class StepWeight(NamedTuple):
    """The weight of a local step.

    Attributes:
        units: the exact weight, in the units of ``weights.py``.
        of_replicas: the weights by which ``PerReplica`` gradients are averaged; None: equal ones.
    """

    units: int = ONE
    of_replicas: tuple[float, ...] | None = None

    @property
    def factor(self) -> float:
        """What multiplies the gradient in the sum: the weight, rounded once."""
        return 1.0 if self.units == ONE else from_units(self.units)


_ONE = StepWeight()


def as_step_weight(weight: Any, num_replicas: int) -> StepWeight:
    """Validates the weight of a step.

    Args:
        weight: a number, or a list with one for each replica, whose sum is the weight.
        num_replicas: the number of replicas of the worker.

    Raises:
        TypeError: a weight is not a number on the host.
        ValueError: it is negative, infinite or NaN; or the list has a wrong length.
    """
    if type(weight) is int and weight == 1:  # the default
        return _ONE
    weights = as_weights(weight)
    if isinstance(weights, float):
        return StepWeight(sum_weights([weights]))
    if len(weights) != num_replicas:
        raise ValueError(
            f"weight has {len(weights)} entries; expected {num_replicas}, one per replica of the "
            "worker"
        )
    return StepWeight(sum_weights(weights), weights if len({*weights}) > 1 else None)
