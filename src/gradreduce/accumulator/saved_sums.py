"""How partial sums get out of an accumulator and in again, each kind of them in its own way.

Never takes a lock and never looks at a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradreduce.device import Buffer, Device, DType, accumulate_dtype, compatible
from gradreduce.errors import about
from gradreduce.indexed_slices import UNKNOWN, IndexedSlices
from gradreduce.interop import host_array, is_array, shape_and_dtype
from gradreduce.ops import Slots, joined_indices

from .state import AccumulatorState, SparseSum

__all__ = ["DenseSums", "SparseSums", "sums_of"]

_Shape = tuple[int | None, ...] | None


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
    def fits(shape: _Shape, wanted: _Shape) -> bool:
        """Whether a sum of that shape may be the accumulator's, whose shape is ``wanted``."""
        if shape is None or None in shape:
            return False
        return wanted is None or compatible([extent or 0 for extent in shape], wanted)

    @staticmethod
    def checked(name: str, given: Any, dtype: DType, shape: tuple[int, ...], count: int) -> Any:
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


class SparseSums:
    """As ``DenseSums``, of rows: three arrays, in the order of their indices."""

    format = "gradreduce sparse accumulator 1"
    _KEYS = ("indices", "num_touches", "values")

    @staticmethod
    def copied(total: SparseSum) -> SparseSum:
        """Their slots change no more; the rows do."""
        return SparseSum(total.slots, DenseSums.copied(total.rows))

    @classmethod
    def downloaded(cls, copy: SparseSum, deadline: float | None) -> dict[str, Any]:
        """The indices, how many gradients touched each, and the rows; waits for the device."""
        slots = copy.slots
        rows = DenseSums.downloaded(copy.values, deadline)[slots.places]
        return dict(zip(cls._KEYS, (slots.indices.copy(), slots.num_touches(), rows), strict=True))

    @classmethod
    def fits(cls, shape: _Shape, wanted: _Shape) -> bool:
        """As of ``DenseSums``; the first extent may be unknown, and the array may have more."""
        if not shape or None in shape[1:] or len(shape) < len(wanted or ()):
            return False
        if not wanted:
            return True
        first = [UNKNOWN if extent is None else extent for extent in shape[: len(wanted)]]
        return compatible(first, wanted)

    @classmethod
    def checked(
        cls, name: str, given: Any, dtype: DType, shape: tuple[int, ...], count: int
    ) -> dict[str, Any]:
        """The three as host arrays; only to be read."""
        if not isinstance(given, Mapping):
            raise TypeError(f"{name} is a {type(given).__name__}, not a dict or None")
        if set(given) != set(cls._KEYS):
            raise KeyError(f"{name} has {sorted(map(str, given))}, must have {list(cls._KEYS)}")
        values, wide = given["values"], accumulate_dtype(dtype)
        try:
            slices = IndexedSlices(values, given["indices"], shape)
            touches = joined_indices([host_array(given["num_touches"])])
        except (TypeError, ValueError) as error:
            raise about(name, error) from None
        indices = slices.indices
        if slices.dtype != wide or not is_array(values):
            raise ValueError(f"{name}['values'] is {slices.dtype}, must be {wide}")
        if not (indices[1:] > indices[:-1]).all():
            raise ValueError(f"{name}['indices'] must rise: {indices}")
        if touches.dtype.kind not in "iu" or touches.shape != indices.shape:
            raise ValueError(
                f"{name}['num_touches'] must be an integer for each of {len(indices)} indices"
            )
        if len(indices) and not 1 <= touches.min() <= touches.max() <= count:
            raise ValueError(f"{name}['num_touches'] must be from 1 to {count}: {touches}")
        found = (indices, touches.astype("int64"), host_array(values))
        return dict(zip(cls._KEYS, found, strict=True))

    @staticmethod
    def uploaded(device: Device, host: dict[str, Any]) -> SparseSum:
        """New memory on the device, as large as the rows are many."""
        slots = Slots.of(host["indices"], host["num_touches"])
        return SparseSum(slots, device.upload(host["values"]))


def sums_of(state: AccumulatorState) -> Any:
    """How the partial sums of this accumulator get out and in: one of the two classes."""
    return SparseSums if state.sparse else DenseSums
