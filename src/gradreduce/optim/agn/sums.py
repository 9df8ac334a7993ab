"""Sums of the gradients of a period: rows if all gradients are sparse, else arrays."""

from __future__ import annotations

from collections.abc import Mapping

from gradreduce import ops
from gradreduce.accumulator.sparse_storage import SparseSum
from gradreduce.arrays.indexed_slices import IndexedSlices, coalesce_n, to_dense_n
from gradreduce.arrays.variable import Variable
from gradreduce.device import Buffer, accumulate_dtype, copy_to

# In the accumulate dtype: an array on each device of the variable, or rows on its first device.
Sum = tuple[Buffer, ...] | SparseSum
Sums = Mapping[Variable, Sum]


def dense_sum(var: Variable, total: Sum | None, *, fill: bool = True) -> tuple[Buffer, ...]:
    """Returns a sum as arrays, converted from rows or newly allocated if necessary.

    Args:
        var: the variable.
        total: the sum of its gradients; None for zero.
        fill: whether to fill new arrays with zeros; otherwise they are uninitialized.
    """
    if isinstance(total, tuple):
        return total
    if total is None:
        dtype = accumulate_dtype(var.dtype)
        return tuple(
            (device.zeros if fill else device.empty)(var.shape, dtype) for device in var.devices
        )
    (whole,) = to_dense_n([merge_rows(var.shape, total)])
    return (whole, *(copy_to(device, whole) for device in var.devices[1:]))


def merge_rows(shape: tuple[int, ...], total: SparseSum) -> IndexedSlices:
    """Returns the rows of a sum in the order of their indices, in new memory."""
    plan, _ = ops.merge_row_index([total.slots], mean=False)
    (rows,) = coalesce_n([total.rows], [plan])
    return IndexedSlices.of(rows, plan.indices, shape)
