"""What is the same in every update of the same variables: worked out once; never launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradreduce import ops
from gradreduce.device import Buffer, by_physical
from gradreduce.interop import reading
from gradreduce.variables import Variable

from .arrivals import Near
from .slots import Slots

__all__ = ["Plan"]


class Plan:
    """An update of these variables, in this order.

    Args:
        variables: all their slots exist.
        slots: of the optimizer.
        kernel: that is compiled; None of a rule on arrays.

    Attributes:
        written: for each copy of each variable what an update of it writes.
        devices: of each copy.
        ranges: where all of that lies.
        places: for each physical device the copies there.
        alike: whether one launch serves all rows of a device.
    """

    def __init__(
        self, variables: Sequence[Variable], slots: Slots, kernel: ops.RuleKernel | None
    ) -> None:
        self.variables = tuple(variables)
        self.kernel = kernel
        self.written = [row for var in variables for row in slots.rows(var)]
        self.devices = [row[0].device for row in self.written]
        self.ranges = ops.Ranges([operand for row in self.written for operand in row])
        self.places = list(by_physical(self.devices).values())
        self._dtypes = [var.dtype for var in self.variables]
        self._shapes = [var.shape for var in self.variables]
        kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in self.written}
        self.alike = len(kinds) == 1
        self._addresses: list[int] = []
        self._has_copies = len(self.devices) > len(self.variables)

    def plain(self, gradients: Sequence[Any]) -> list[Near] | None:
        """What ``near`` would make of them, if all are Buffers that lie where they are wanted.

        In a few looks at all of them at once, since a step may have hundreds. None of others.
        """
        if self._has_copies or not all([type(grad) is Buffer for grad in gradients]):
            return None
        fit = (
            [grad.device for grad in gradients] == self.devices
            and [grad.dtype for grad in gradients] == self._dtypes
            and [grad.shape for grad in gradients] == self._shapes
        )
        if not fit:
            return None
        if {grad.lender for grad in gradients} != {None}:
            reading(gradients)
        return [(grad,) for grad in gradients]

    def lie_as_before(self, gradients: Sequence[Near]) -> bool:
        """Whether each begins where that of the last update did, and so is apart, as that was.

        Asked of what ``plain`` gave, whose sizes are those of the variables.
        """
        return _addresses(gradients) == self._addresses

    def are_apart(self, gradients: Sequence[Near]) -> None:
        """Remembers where they lie: they share nothing with what is written."""
        self._addresses = _addresses(gradients)


def _addresses(gradients: Sequence[Near]) -> list[int]:
    return [near[0].address for near in gradients]  # type: ignore[union-attr]  # all Buffers
