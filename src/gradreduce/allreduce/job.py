"""What an all-reduce algorithm is asked to do; never does it."""

from __future__ import annotations

from dataclasses import dataclass

from gradreduce.device import Buffer

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One pack: every out becomes the sum of all inputs, divided.

    Attributes:
        inputs: one for each replica, in mesh order, on its device; all of one size and dtype.
        outs: one for each replica, on its device. Each is its input exactly, or new memory.
        divisor: of the sum; 1 divides nothing.
    """

    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    divisor: float = 1

    def part(self, start: int, stop: int) -> Job:
        """The job for the elements from ``start`` to ``stop``."""
        if start == 0 and stop == self.inputs[0].size:
            return self
        shape = (stop - start,)
        return Job(
            tuple(buffer.view(start, shape) for buffer in self.inputs),
            tuple(buffer.view(start, shape) for buffer in self.outs),
            self.divisor,
        )
