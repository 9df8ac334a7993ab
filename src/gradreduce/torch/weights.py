"""Weights of micro-batches: what the sums of a step are divided by, and the hooks that multiply."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import ref

import torch

from gradreduce.comm.replicas import Replicas
from gradreduce.device import Mesh
from gradreduce.weights import ONE, from_numbers, from_units, to_numbers

# The processes compare it, so an error contains it if only some use weights in a step.
_CALL = "the sum of the weights, which all processes use in a step, or none"
_numbers = count()


class BackwardLocal:
    """A value of each thread, which hooks in all threads of its ``backward`` calls see."""

    def __init__(self) -> None:
        self._key = f"gradreduce.torch.{next(_numbers)}"

    def get(self) -> Any:
        """Returns the value of this thread, or of the ``backward`` that calls this; first None."""
        if torch._C._is_key_in_tls(self._key):
            return torch._C._get_obj_in_tls(self._key)
        return None

    def set(self, value: Any) -> None:
        """Sets the value of this thread."""
        torch._C._stash_obj_in_tls(self._key, value)


class StepDivisor:
    """What the sums of a step are divided by: the same in all processes.

    Attributes:
        total: the sum of all weights. None: it is the number of replicas, so that the means of
            ``AllReduceCrossDeviceOps`` are the weighted means.
        error: why there is no total. Then nothing is reduced, in any process.
        reads: whether the gradients of this process count. If not, they may be NaN.
    """

    def __init__(self) -> None:
        self.total: float | None = None
        self.error: ValueError | None = None
        self.reads = True

    def add(self, units: int, mesh: Mesh) -> None:
        """Adds the weights of all processes; the host waits for the others.

        Args:
            units: the exact sum of the weights of this process; see ``gradreduce.weights``.
            mesh: the devices of this process.
        """
        total = units
        if mesh.num_processes > 1:
            rows = Replicas(mesh.devices).compare_numbers(_CALL, to_numbers(units))
            total = sum(map(from_numbers, rows))
        self.set_total(total, mesh.num_replicas)

    def set_total(self, total: int, num_replicas: int) -> None:
        """Sets the total to an exact sum."""
        if total == num_replicas * ONE:
            return
        try:
            self.total = from_units(total)
        except OverflowError:
            self.error = ValueError("the sum of the weights of a step exceeds the largest float64")
        if total == 0:
            self.error = ValueError(
                "the weights of all micro-batches of this step are 0, so their gradients have no "
                "mean: call backward with a weight above 0 in some process"
            )


def divide(tensor: Any, total: float | None) -> None:
    """Divides a tensor of sums by the sum of the weights, in place; None: they are means."""
    if total is None:
        return
    by: Any = total
    if (
        tensor.is_cuda and tensor.real.itemsize > 2
    ):  # for a number, PyTorch would multiply by 1 / by
        by = torch.full((), total, dtype=tensor.real.dtype, device=tensor.device)
    tensor.div_(by)


def multiplier(
    weights: BackwardLocal, replica: Any, index: int, parameter: ref[Any], *, exact: bool = False
) -> Callable[[Any], Any]:
    """Returns a hook that multiplies each new gradient of a parameter by the weight.

    Args:
        weights: the weight of each ``backward``, as a number and a tensor without axes; None: 1.
        replica: the ``Replica`` of the parameter.
        index: of the parameter in the replica.
        parameter: refers to the parameter.
        exact: for an ``ExactReducer``, which multiplies itself, in the accumulate dtype: only
            replaces gradients of weight 0, by -0.0, which changes no sum.
    """

    def multiply(grad: Any) -> Any:
        if replica.waits and replica.units:
            replica.forget_dropped()
        weight, factor = weights.get() or (1, None)
        if weight == 1:
            return None
        if exact and weight:
            return None
        if weight:
            return grad * factor
        if getattr(parameter(), "grad", grad) is None:
            replica.zeroed.append(index)
        zeros = torch.zeros_like(grad)
        return -zeros if exact else zeros

    return multiply
