"""How rows with the same index become one row: ``kernels/segment_sum.cu`` and its twin."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradreduce.device import (
    Buffer,
    Device,
    Kernel,
    Queue,
    accumulate_dtype,
    element_of,
    flat_layout,
)
from gradreduce.device.kernel import Arrays

from .segments import Segments
from .validate import (
    FROM_WIDE,
    SAME,
    TO_WIDE,
    as_elements,
    check_apart,
    check_divisor,
    check_writable,
    elements,
)

__all__ = ["SEGMENT_SUM", "Divisor", "prepare_segment_sum", "ready_segment_sum", "segment_sum"]

# The twin adds the k-th rows of all segments at once while k is below this, and then the rest of
# each long segment by itself: neither a few long nor many short ones make many NumPy calls.
LEVELS = 128
PART_SIZE = 1 << 16  # elements of a long segment at a time: the scratch stays in the cache

Divisor = float | np.ndarray  # of every segment, or float64 with one for each
_Key = tuple[str, str, int, int, float]


def _segment_sum_reference(
    table: Sequence[Arrays], has_into: int, has_divisors: int, divisor: float
) -> None:
    """``out[into[s]] = (values[order[b]] + … + values[order[e-1]]) / divisors[s]``, b to e.

    A row that is given as ``~row`` is added to.
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
    """Into the rows of the out; where ``into`` is negative, on top of what they hold."""
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
    """The sum of every segment, ``(num_segments, width)``, in the accumulate type."""
    wide = accumulate_dtype(values.dtype)
    starts, counts = bounds[:-1], np.diff(bounds)
    total: np.ndarray = values[order[starts]].astype(wide, copy=False)
    for level in range(1, min(LEVELS, int(counts.max()))):
        more = np.flatnonzero(counts > level)
        total[more] += values[order[starts[more] + level]]
    step = max(1, PART_SIZE // values.shape[1])
    for segment in np.flatnonzero(counts > LEVELS):
        for start in range(bounds[segment] + LEVELS, bounds[segment + 1], step):
            part = order[start : min(start + step, bounds[segment + 1])]
            terms = np.concatenate([total[segment, None], values[part].astype(wide)])
            # accumulate is left to right by its definition; reduce may add in pairs.
            total[segment] = np.add.accumulate(terms, axis=0, dtype=wide)[-1]
    return total


def _items(sizes: Sequence[int]) -> int:
    """A column of a segment is one: of operands out, values, order, …, bounds."""
    num_values, num_rows, num_segments = sizes[1], sizes[2], sizes[-1] - 1
    return num_values // num_rows * num_segments if num_rows else 0


SEGMENT_SUM = Kernel(
    name="segment_sum",
    source="segment_sum",
    reference=_segment_sum_reference,
    scalars=(("has_into", "int64"), ("has_divisors", "int64"), ("divisor", "float64")),
    templates=(*SAME, *TO_WIDE, *FROM_WIDE),
    items=_items,
)


def segment_sum(
    outs: Sequence[Buffer],
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    *,
    into: Sequence[np.ndarray | None] | None = None,
    divisor: Divisor | Sequence[Divisor] = 1,
    device: Device | None = None,
    queue: Queue = "compute",
) -> None:
    """``outs[t][into[t][s]]`` becomes the sum of the rows in segment s, for every tensor t.

    Left to right in the order in which the rows came, so the same bits every time. Halves are
    added in float32 and rounded once. One upload of the plans of all tensors; one launch for
    those with the same dtypes and divisor that agree in having ``into``.

    Args:
        outs: one per tensor, ``(rows, …)``; overwritten where ``into`` says. Shares no memory
            with ``values``.
        values: one per tensor, ``(num_rows, …)``; of the out's dtype or one that is cast to it.
        segments: one per tensor, of as many rows as ``values`` has.
        into: for each tensor the row of the out that each segment becomes, int64, none twice;
            ``~row`` instead adds the segment's sum to what that row holds, in the accumulate type
            of the out. None (for one tensor or all): row s is segment s, and there is no other.
        divisor: of every sum, or one for each tensor: a number, or float64 for each segment. In
            the accumulate type, before the one rounding; 1 divides nothing.
        device: whose queue launches; it holds the plans. Default: that of ``outs[0]``. Fences
            nothing.
        queue: which of its queues.

    Raises:
        ValueError: sizes, rows or dtypes do not fit, an out overlaps its values, ``into`` names a
            row twice or one that the out has not, or integers would be divided.
    """
    ready_segment_sum(
        outs, values, segments, into=into, divisor=divisor, device=device, queue=queue
    )()


def ready_segment_sum(
    outs: Sequence[Buffer],
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    *,
    into: Sequence[np.ndarray | None] | None = None,
    divisor: Divisor | Sequence[Divisor] = 1,
    device: Device | None = None,
    queue: Queue = "compute",
) -> Callable[[], None]:
    """As ``segment_sum``, but only checks and uploads; calling what it returns launches.

    So that what makes several launches has its memory before the first.
    """
    planned = _planned(outs, values, segments, into, divisor)
    if not planned:
        return lambda: None
    home = device or outs[0].device
    uploaded = _upload([row.plan for row in planned], home, queue)
    launches: dict[_Key, list[list[Buffer]]] = {}
    for row, plans in zip(planned, uploaded, strict=True):
        launches.setdefault(row.key, []).append([*row.operands, *plans])

    def launch() -> None:
        for (to, of, *scalars), rows in launches.items():
            home.launch(SEGMENT_SUM, (to, of), rows, scalars, queue=queue)

    return launch


def prepare_segment_sum(device: Device, out: np.dtype, term: np.dtype) -> None:
    """Compiles what ``segment_sum`` with these dtypes launches."""
    device.prepare(SEGMENT_SUM, (element_of(out).name, element_of(term).name))


class _Row(NamedTuple):
    """One tensor of a call, checked.

    Attributes:
        key: elements, whether it has ``into`` and divisors of its own, the divisor if not.
        operands: out and values, in the types that kernels know.
        plan: the arrays that go to the device: order, into, divisors, bounds.
    """

    key: _Key
    operands: list[Buffer]
    plan: list[np.ndarray]


def _planned(
    outs: Sequence[Buffer],
    values: Sequence[Buffer],
    segments: Sequence[Segments],
    into: Sequence[np.ndarray | None] | None,
    divisor: Divisor | Sequence[Divisor],
) -> list[_Row]:
    """The tensors that have an element to add, after all of them have been checked."""
    indices = [None] * len(outs) if into is None else into
    divisors = divisor if isinstance(divisor, Sequence) else [divisor] * len(outs)
    planned = []
    for out, term, plan, index, by in zip(outs, values, segments, indices, divisors, strict=True):
        to, of = elements(SEGMENT_SUM, out, term)
        _check_rows(out, term, plan, index)
        _check_divisors(term, plan, by)
        own = by if isinstance(by, np.ndarray) else None
        number = float(by) if own is None else 1.0
        parts = [part for part in (plan.order, index, own, plan.bounds) if part is not None]
        key = (to, of, int(index is not None), int(own is not None), number)
        if term.size:
            planned.append(_Row(key, as_elements([out, term]), parts))
    return planned


def _check_rows(out: Buffer, values: Buffer, plan: Segments, into: np.ndarray | None) -> None:
    """Raises ``ValueError`` if one tensor's rows do not fit its segments, or the out."""
    num_segments = plan.num_segments
    if not out.shape or values.shape[:1] != (plan.num_rows,):
        raise ValueError(f"segment_sum: {plan.num_rows} rows in segments, {values} into {out}")
    if math.prod(out.shape[1:]) != math.prod(values.shape[1:]):
        raise ValueError(f"segment_sum: rows of other sizes: {out} and {values}")
    if into is None:
        if out.shape[0] != num_segments:
            raise ValueError(f"segment_sum: {num_segments} segments into the rows of {out}")
    elif into.shape != (num_segments,) or into.dtype != np.int64:
        raise ValueError(
            f"segment_sum: into={reprlib.repr(into)} is not a row for each segment, int64"
        )
    else:
        _check_into(out, into)
    check_writable("segment_sum", [out])
    check_apart("segment_sum", out, values)


def _check_into(out: Buffer, into: np.ndarray) -> None:
    """Raises ``ValueError`` if it leaves the out, or two sums would go into one row."""
    rows = np.where(into < 0, ~into, into)
    if rows.max(initial=-1) >= out.shape[0]:
        raise ValueError(f"segment_sum: into={reprlib.repr(into)} leaves {out}")
    if (np.diff(rows) <= 0).any() and np.unique(rows).size < rows.size:  # rising ones cannot
        raise ValueError(f"segment_sum: into={reprlib.repr(into)} names a row of {out} twice")


def _check_divisors(values: Buffer, plan: Segments, divisor: Divisor) -> None:
    """Raises ``ValueError`` if integers would be divided, or there is not one for each segment."""
    if not isinstance(divisor, np.ndarray):
        check_divisor("segment_sum", divisor, [values])
        return
    if values.dtype.kind in "iu":
        raise ValueError(f"segment_sum: {values.dtype} is not divided (divisor={divisor})")
    if divisor.shape != (plan.num_segments,) or divisor.dtype != np.float64:
        raise ValueError(
            f"segment_sum: divisors {divisor.dtype}{list(divisor.shape)} for {plan.num_segments} "
            "segments: one float64 for each is needed"
        )


def _upload(
    tensors: Sequence[Sequence[np.ndarray]], device: Device, queue: Queue
) -> list[list[Buffer]]:
    """Arrays of eight-byte numbers on the device, in one piece, each at a vector boundary."""
    parts = [part for tensor in tensors for part in tensor]
    layout = flat_layout([part.size for part in parts], 8)
    words = np.zeros(layout.size, np.int64)
    for part, offset in zip(parts, layout.offsets, strict=True):
        words[offset : offset + part.size] = part.view(np.int64)
    flat = device.upload(words, queue=queue)
    views = (
        flat.view(offset, part.shape, part.dtype)
        for part, offset in zip(parts, layout.offsets, strict=True)
    )
    return [[next(views) for _ in tensor] for tensor in tensors]
