"""What is the same in every update of the same variables: worked out once; never launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradreduce import ops
from gradreduce.device import Buffer, Device, Writer, by_physical
from gradreduce.interop import reading
from gradreduce.interop_staging import Staging
from gradreduce.variables import Variable

__all__ = ["Plan", "devices_of"]


class Plan:
    """An update of these variables, in this order.

    Args:
        variables: in their order.
        rows_of: for each copy of a variable what an update of it writes, the variable first.
        kernel: that is compiled; None of a rule on arrays.

    Attributes:
        written: for each copy of each variable what an update of it writes.
        devices: of each copy.
        ranges: where all of that lies.
        places: for each physical device the copies there.
        writers: for each physical device what launches there, if one launch serves all rows.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        rows_of: Callable[[Variable], list[list[Buffer]]],
        kernel: ops.RuleKernel | None,
    ) -> None:
        self.variables = tuple(variables)
        self.kernel = kernel
        self.written = [row for var in variables for row in rows_of(var)]
        self.devices = [row[0].device for row in self.written]
        self.ranges = ops.Ranges([operand for row in self.written for operand in row])
        self.places = list(by_physical(self.devices).values())
        self._wanted = [(row[0].device, row[0].dtype, row[0].shape) for row in self.written]
        kinds = {(id(row[0].dtype), id(row[-1].dtype), len(row)) for row in self.written}
        self.writers = [
            Writer(self.devices[places[0]], [self.written[place] for place in places])
            if len(kinds) == 1
            else None
            for places in self.places
        ]
        self._staging = Staging(self._wanted)
        self._addresses: list[int] = []
        self._has_copies = len(self.devices) > len(self.variables)

    def plain(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        """The gradients where they are wanted, if each is one Buffer there or a host array.

        In one quick look at each, since a step may have hundreds. None if one is anything else.
        """
        if self._has_copies:
            return None
        is_lent = False
        for grad, (device, dtype, shape) in zip(gradients, self._wanted, strict=True):
            if type(grad) is not Buffer:
                return self._from_host(gradients)
            if grad.device is not device or grad.dtype is not dtype or grad.shape != shape:
                return None
            is_lent = is_lent or grad.lender is not None
        if is_lent:
            reading(gradients)
        return gradients

    def _from_host(self, gradients: Sequence[Any]) -> Sequence[Buffer] | None:
        # A rule on arrays may keep what it is shown; a capture would keep the values of now.
        if self.kernel is None or self.devices[0].fabric.capture is not None:
            return None
        return self._staging.staged(gradients)

    def lie_as_before(self, gradients: Sequence[Buffer]) -> bool:
        """Whether each begins where that of the last update did, and so is apart, as that was.

        Asked of what ``plain`` gave, whose sizes are those of the variables.
        """
        return [grad.address for grad in gradients] == self._addresses

    def are_apart(self, gradients: Sequence[Buffer]) -> None:
        """Remembers where they lie: they share nothing with what is written."""
        self._addresses = [grad.address for grad in gradients]


def devices_of(variables: Sequence[Variable]) -> list[Device]:
    """That of each copy of each variable."""
    return [copy.device for var in variables for copy in var.buffers]
