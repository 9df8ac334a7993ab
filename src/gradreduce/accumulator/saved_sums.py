"""How partial sums get out of an accumulator and in again, each kind of them in its own way.

Never takes a lock and never looks at a count.
"""

from __future__ import annotations

from typing import Any

from gradreduce.device import Buffer, Device, DType, accumulate_dtype
from gradreduce.errors import about
from gradreduce.interop import host_array, is_array, shape_and_dtype

from .state import AccumulatorState

__all__ = ["DenseSums", "sums_of"]


class DenseSums:
    """How a partial sum that is one array gets out and in; another kind has these names too.

    Attributes:
        format: what a state says that it holds, with the number of the layout's version.
    """

    format = "gradreduce dense accumulator 1"

    @staticmethod
    def copied(total: Buffer) -> Buffer:
        """New memory on the sum's own device; the copy is queued there, nothing waits."""
        copy = total.device.empty(total.shape, total.dtype)
        total.device.copy(copy, total)
        return copy

    @staticmethod
    def downloaded(copy: Buffer, deadline: float | None) -> Any:
        """As a host array; waits for the device."""
        return copy.numpy(deadline=deadline)

    @staticmethod
    def checked(name: str, given: Any, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A host array of that shape, in the accumulate type of ``dtype``; only to be read."""
        if not is_array(given):
            raise TypeError(f"{name} is a {type(given).__name__}, not an array or None")
        try:
            found = shape_and_dtype(given)
        except TypeError as error:
            raise about(name, error) from None
        wanted = (shape, accumulate_dtype(dtype))
        if found != wanted:
            raise ValueError(f"{name} is {found[1]}{found[0]}, must be {wanted[1]}{wanted[0]}")
        return host_array(given)

    @staticmethod
    def uploaded(device: Device, host: Any) -> Buffer:
        """New memory on the device: applies write it, the caller's array they must not."""
        return device.upload(host)


def sums_of(state: AccumulatorState) -> type[DenseSums]:
    """How the partial sums of this accumulator get out and in."""
    return DenseSums
