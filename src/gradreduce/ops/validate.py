"""Validates the operands of a launch, and lists the template arguments of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradreduce.device import Buffer, Kernel, Template, element_of, mean_dtype, overlap
from gradreduce.device.buffer import Row
from gradreduce.device.dtypes import ELEMENTS

FLOATS = ("float16", "bfloat16", "float32", "float64")
# <T, T>
SAME: tuple[Template, ...] = tuple((element, element) for element in ELEMENTS)
# A gradient added to a sum of a wider dtype (or, with cast=True, of another float).
TO_ACC: tuple[Template, ...] = tuple(
    (total, term) for total in ("float32", "float64") for term in FLOATS if term != total
)
# A float32 sum rounded to a 16-bit float.
FROM_ACC: tuple[Template, ...] = (("float16", "float32"), ("bfloat16", "float32"))
# Every float into every other: the dtype of a tensor and the wire dtype are independent.
CASTS: tuple[Template, ...] = tuple((out, term) for out in FLOATS for term in FLOATS if out != term)
# Of an update: a variable and its slots, which are float32 if there is a master.
UPDATES: tuple[Template, ...] = (
    *((element, element) for element in FLOATS),
    *((half, "float32") for half in FLOATS[:2]),
)
# Integers into their mean; the only templates that distinguish signed from unsigned.
MEAN: tuple[Template, ...] = tuple(
    (mean_dtype(np.dtype(name)).name, name)
    for name in (f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
)


# From this many rows on they are checked with NumPy: below, its calls cost more than a loop.
MANY = 12


def check_rows(
    name: str,
    rows: Sequence[Row],
    num_written: int,
    *,
    padded: bool = False,
) -> None:
    """Validates sizes, dtypes and overlaps of the rows of one launch.

    Args:
        name: of the kernel, for messages.
        rows: with the same number of operands each, the written ones first.
        num_written: number of written operands of each row.
        padded: the one written operand may be longer than the one that is read.

    Raises:
        ValueError: sizes differ, the dtypes of the written or of the read operands differ, or a
            written operand overlaps another one without being exactly it.
    """
    if not rows:
        return
    if len(rows) >= MANY and _all_fit(rows, num_written, padded=padded):
        return
    for row in rows:
        written, read = row[:num_written], row[num_written:]
        if padded and written[0].size != read[0].size:
            _check_padded(name, written[0], read[0])
        else:
            _check_row(name, written, read)


def _check_row(name: str, written: Row, read: Row) -> None:
    operands = (*written, *read)
    for index, operand in enumerate(operands):
        leader = written[0] if index < len(written) else read[0]
        if operand.dtype != leader.dtype:
            raise ValueError(f"{name}: dtypes differ: {operand} and {leader}")
        if operand.size != operands[0].size:
            raise ValueError(f"{name}: sizes differ: {operand} and {operands[0]}")
    for index, target in enumerate(written):
        for other_place, other in enumerate(operands):
            allowed = other_place == index or (other_place >= len(written) and _same(target, other))
            if not allowed and overlap(target, other):
                raise ValueError(f"{name}: {target} overlaps operand {other_place}, {other}")


def _check_padded(name: str, out: Buffer, term: Buffer) -> None:
    if out.size < term.size:
        raise ValueError(f"{name}: output {out} is shorter than input {term}")
    _check_row(name, [out.view(0, term.shape)], [term])
    check_no_overlap(name, out.view(term.size, (out.size - term.size,)), term)


def _same(buffer: Buffer, other: Buffer) -> bool:
    return buffer.address == other.address and buffer.nbytes == other.nbytes


def _all_fit(rows: Sequence[Row], num_written: int, *, padded: bool) -> bool:
    """Whether all rows pass; if not, each row must be checked on its own."""
    columns = list(zip(*rows, strict=True))
    starts, ends, sizes = [], [], []
    for index, column in enumerate(columns):
        dtype = columns[0 if index < num_written else num_written][0].dtype
        if [operand.dtype for operand in column].count(dtype) != len(column):
            return False
        sizes.append(np.array([operand.size for operand in column], np.int64))
        starts.append(np.array([operand.address for operand in column], np.int64))
        ends.append(starts[-1] + dtype.itemsize * sizes[-1])
        shorter = sizes[-1] <= sizes[0] if padded else sizes[-1] == sizes[0]
        if not shorter.all():
            return False
    for target in range(num_written):
        for other in range(target + 1, len(columns)):
            apart = (starts[target] >= ends[other]) | (starts[other] >= ends[target])
            if other >= num_written:  # exactly the same memory, or (padded) a cast to as many bytes
                apart |= (starts[target] == starts[other]) & (
                    ends[target] - starts[target] == ends[other] - starts[other]
                )
            if not apart.all():
                return False
    return True


def check_no_overlap(name: str, target: Buffer, other: Buffer) -> None:
    """Raises ``ValueError`` if the two buffers overlap."""
    if overlap(target, other):
        raise ValueError(f"{name}: {target} overlaps {other}")


class Ranges:
    """Sorted address ranges of disjoint buffers, for repeated overlap queries.

    Args:
        buffers: none overlaps another.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        starts = np.array([buffer.address for buffer in buffers], np.uint64)
        order = np.argsort(starts)
        self._starts = starts[order]
        sizes = np.array([buffer.nbytes for buffer in buffers], np.uint64)
        self._ends = self._starts + sizes[order]

    def shared_by(self, buffers: Sequence[Buffer]) -> int | None:
        """The index of the first of ``buffers`` that overlaps a range; None if none does."""
        starts = np.array([buffer.address for buffer in buffers], np.uint64)
        ends = starts + np.array([buffer.nbytes for buffer in buffers], np.uint64)
        before = np.searchsorted(self._starts, ends)  # how many begin before its end
        shares = (before > 0) & (ends > starts)
        shares &= starts < self._ends[before - 1] if self._ends.size else False
        return int(shares.argmax()) if shares.any() else None


def check_writable(name: str, written: Sequence[Buffer]) -> None:
    """Raises ``ValueError`` if a written operand is read-only.

    A launch checks this too, but only after earlier launches of the same call.
    """
    for target in written:
        if not target.block.writable:
            raise ValueError(f"{name}: {target} is read-only")


def check_divisor(name: str, divisor: float, terms: Sequence[Buffer]) -> None:
    """Raises ``ValueError`` if a buffer of integers would be divided.

    Integers are added modulo 2**bits; a quotient of that has no meaning.
    """
    for term in terms if divisor != 1 else ():
        if term.dtype.kind in "iu":
            raise ValueError(f"{name}: cannot divide {term.dtype} (divisor={divisor})")


def check_groups(
    kernel: Kernel, groups: Iterable[Sequence[Row]], num_written: int = 1, *, padded: bool = False
) -> None:
    """Validates rows that ``same_dtypes`` has grouped.

    Raises:
        ValueError: as in ``check_rows``; or a row has no output or no input, an output is
            read-only, or the kernel does not have this cast.
    """
    for group in groups:
        if not 0 < num_written < len(group[0]):
            raise ValueError(f"{kernel.name}: every tensor needs an output and an input")
        check_rows(kernel.name, group, num_written, padded=padded)
        for index in range(num_written):
            check_writable(kernel.name, [row[index] for row in group])
        elements(kernel, group[0][0], group[0][-1])


def elements(kernel: Kernel, written: Buffer, read: Buffer) -> tuple[str, str]:
    """The elements of an output and of an input, for a template.

    Raises:
        ValueError: the kernel does not have this cast.
    """
    to, of = element_of(written.dtype), element_of(read.dtype)
    names = (to.name, of.name)
    # Views are not converted: a cast is between two different elements, of as many lanes.
    casts = to.lanes == of.lanes and any(each[:2] == names for each in kernel.templates)
    if written.dtype != read.dtype and not (casts and to.name != of.name):
        raise ValueError(f"{kernel.name}: cannot cast input {read} to output {written}")
    return names
