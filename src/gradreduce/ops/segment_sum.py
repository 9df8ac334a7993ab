"""Sums rows of the same index: launcher of ``segment_sum.cu`` and NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradreduce.device import (
    ELEMENT_OF,
    Arrays,
    Buffer,
    Device,
    Kernel,
    accumulate_dtype,
    as_elements,
    group_by,
)

from .segments import Segments, upload_together
from .templates import FROM_ACC, SAME, TO_ACC

# The NumPy reference adds the k-th rows of all segments at once while k is below this number, then
# the rest of each long segment separately. So few long segments and many short ones both need few
# NumPy calls.
LEVELS = 128
PART_SIZE = 1 << 16  # elements of a long segment that are added at a time: scratch stays in cache

Divisor = float | np.ndarray  # one for all segments, or float64 with one for each
# Element types, whether a row has ``into`` and its own divisors, and the divisor otherwise.
_LaunchKey = tuple[str, str, int, int, float]


def _segment_sum_reference(
    table: Sequence[Arrays], has_into: int, has_divisors: int, divisor: float
) -> None:
    """``out[into[s]] = (values[order[b]] + … + values[order[e-1]]) / divisors[s]``, b to e.

    For an ``into`` of ``~row`` the sum is added to the row.
    """
    for out, values, order, *optional, bounds in table:
        values = values.reshape(order.size, -1)
        total = _left_to_right(values, order, bounds)
        by = total.dtype.type(divisor)
        if has_divisors:
            by = optional[-1].astype(total.dtype)[:, None]
        if has_divisors or divisor != 1:
            np.true_divide(total, by, out=total)
        rows = out.reshape(-1, values.shape[1])
        if has_into:
            _put(rows, optional[0], total)
        else:
            rows[...] = total


def _put(rows: np.ndarray, into: np.ndarray, total: np.ndarray) -> None:
    """Writes sums to rows of the output; adds to those whose ``into`` is negative."""
    held = into < 0
    if not held.any():
        rows[into] = total
        return
    indices = np.where(held, ~into, into)
    sums = total.astype(accumulate_dtype(rows.dtype), copy=False)
    where = slice(None) if held.all() else held
    sums[where] = rows[indices[where]] + sums[where]
    rows[indices] = sums


def _left_to_right(values: np.ndarray, order: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums each segment, to ``(num_segments, width)``, in the accumulate dtype."""
    acc_dtype = accumulate_dtype(values.dtype)
    starts, counts = bounds[:-1], np.diff(bounds)
    total: np.ndarray = values[order[starts]].astype(acc_dtype, copy=False)
    for level in range(1, min(LEVELS, int(counts.max()))):
        more = np.flatnonzero(counts > level)
        total[more] += values[order[starts[more] + level]]
    step = max(1, PART_SIZE // values.shape[1])
    for segment in np.flatnonzero(counts > LEVELS):
        for start in range(bounds[segment] + LEVELS, bounds[segment + 1], step):
            part = order[start : min(start + step, bounds[segment + 1])]
            terms = np.concatenate([total[segment, None], values[part].astype(acc_dtype)])
            # np.add.accumulate adds left to right by definition; np.add.reduce may add in pairs.
            total[segment] = np.add.accumulate(terms, axis=0, dtype=acc_dtype)[-1]
    return total


def _items(sizes: Sequence[int]) -> int:
    """Returns the number of items: one for each column of a segment."""
    num_values, num_rows, num_segments = sizes[1], sizes[2], sizes[-1] - 1
    return num_values // num_rows * num_segments if num_rows else 0


SEGMENT_SUM = Kernel(
    name="segment_sum",
    source="segment_sum",
    reference=_segment_sum_reference,
    scalars=(("has_into", "int64"), ("has_divisors", "int64"), ("divisor", "float64")),
    templates=(*SAME, *TO_ACC, *FROM_ACC),
    items=_items,
)


def segment_sum_command(
    outs: Sequence[Buffer],
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    *,
    into: Sequence[np.ndarray | None] | None = None,
    divisor: Divisor | Sequence[Divisor] = 1,
    device: Device | None = None,
) -> Callable[[], None]:
    """Uploads plans, and returns a function that launches.

    The launch writes the sum of the rows in segment s to ``outs[t][into[t][s]]`` for every tensor
    t. A caller can allocate the memory of several launches before the first launch.

    Adds left to right in the order of the rows, so the result is deterministic. 16-bit floats are
    added in float32 and rounded once. One upload of the plans of all tensors; one launch for
    those with the same dtypes and divisor that all have ``into`` or all do not.

    Args:
        outs: one per tensor, ``(rows, …)``; the rows of ``into`` are overwritten. Must not overlap
            ``values``.
        values: one per tensor, ``(num_rows, …)``; of the output's dtype, or one that is cast to it.
        segments: one per tensor, with as many rows as ``values``.
        into: for each tensor the output row of each segment, int64, without duplicates; ``~row``
            adds the segment's sum to that row instead of overwriting it, in the accumulate dtype of
            the output. None (for one tensor or all): row s is segment s, and there are no others.
        divisor: divides every sum: one for all tensors, or a list with one for each: a number, or a
            float64 array with one for each segment. Divides in the accumulate dtype, before the
            only rounding; 1: no division.
        device: the device whose compute queue launches, and that holds the plans; default: that of
            ``outs[0]``. Adds no stream waits.

    The operands are not validated.
    """
    indices = [None] * len(outs) if into is None else into
    divisors = divisor if isinstance(divisor, Sequence) else [divisor] * len(outs)
    keys: list[_LaunchKey] = []
    operands: list[list[Buffer]] = []
    plans: list[list[np.ndarray]] = []
    for out, term, plan, index, by in zip(outs, values, segments, indices, divisors, strict=True):
        if term.size:
            own, number = (by, 1.0) if isinstance(by, np.ndarray) else (None, float(by))
            to, of = ELEMENT_OF[out.dtype].name, ELEMENT_OF[term.dtype].name
            keys.append((to, of, int(index is not None), int(own is not None), number))
            operands.append(as_elements([out, term]))
            parts = (plan.order, index, own, plan.bounds)
            plans.append([part for part in parts if part is not None])
    if not keys:
        return lambda: None
    home = device or outs[0].device
    made = zip(keys, operands, upload_together(plans, home), strict=True)
    launches = group_by([(key, [*row, *uploaded]) for key, row, uploaded in made])

    def launch() -> None:
        for (to, of, *scalars), rows in launches.items():
            home.launch(SEGMENT_SUM, (to, of), rows, scalars)

    return launch
