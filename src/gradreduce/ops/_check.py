"""Whether the operands of a launch fit together; the door of this folder, never launches.

Also looks at operands as the kernels do: complex as pairs, signed integers as unsigned.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Buffer, Kernel, element_of, overlap
from gradreduce.device.dtypes import Element

__all__ = [
    "as_elements",
    "by_dtype",
    "check_apart",
    "check_divisor",
    "check_row",
    "check_writable",
    "elements",
]


def as_elements(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same memory in the types that kernels know."""
    viewed = []
    for buffer in buffers:
        element = element_of(buffer.dtype)
        if element.viewed is not None:
            buffer = buffer.view(0, (buffer.size * element.lanes,), element.viewed)
        viewed.append(buffer)
    return viewed


def check_row(name: str, written: Sequence[Buffer], read: Sequence[Buffer]) -> None:
    """Checks one row of a launch.

    Raises:
        ValueError: sizes differ, the dtypes of ``written`` or of ``read`` differ among
            themselves, or a written operand overlaps another one without being exactly it.
    """
    operands = (*written, *read)
    for place, operand in enumerate(operands):
        leader = written[0] if place < len(written) else read[0]
        if operand.dtype != leader.dtype:
            raise ValueError(f"{name}: dtypes differ: {operand} and {leader}")
        if operand.size != operands[0].size:
            raise ValueError(f"{name}: sizes differ: {operand} and {operands[0]}")
    for place, target in enumerate(written):
        for other_place, other in enumerate(operands):
            allowed = other_place == place or (other_place >= len(written) and _same(target, other))
            if not allowed and overlap(target, other):
                raise ValueError(f"{name}: {target} overlaps operand {other_place}, {other}")


def _same(buffer: Buffer, other: Buffer) -> bool:
    return buffer.address == other.address and buffer.nbytes == other.nbytes


def check_apart(name: str, target: Buffer, other: Buffer) -> None:
    """Raises ``ValueError`` if the two share a byte."""
    if overlap(target, other):
        raise ValueError(f"{name}: {target} overlaps {other}")


def check_writable(name: str, written: Sequence[Buffer]) -> None:
    """A launch would refuse it too, but an earlier launch of the same call may be out by then.

    Raises:
        ValueError: an operand is read-only.
    """
    for target in written:
        if not target.block.writable:
            raise ValueError(f"{name}: {target} is read-only")


def check_divisor(name: str, divisor: float, terms: Sequence[Buffer]) -> None:
    """Integers are added modulo 2**bits; a quotient of that means nothing.

    Raises:
        ValueError: a divisor other than 1 for an integer buffer.
    """
    for term in terms if divisor != 1 else ():
        if term.dtype.kind in "iu":
            raise ValueError(f"{name}: {term.dtype} is not divided (divisor={divisor})")


def by_dtype(
    kernel: Kernel, rows: Sequence[tuple[list[Buffer], list[Buffer]]]
) -> dict[tuple[str, str, int, int], list[list[Buffer]]]:
    """Rows that one launch can serve, together.

    Keyed by the element of the written operands, that of the read ones, and how many of each.

    Raises:
        ValueError: a row without an out or an input, a read-only out, or a cast that the kernel
            has no template for.
    """
    launches: dict[tuple[str, str, int, int], list[list[Buffer]]] = {}
    for written, read in rows:
        if not written or not read:
            raise ValueError(f"{kernel.name}: a tensor without an out or without an input")
        check_writable(kernel.name, written)
        key = (*elements(kernel, written[0], read[0]), len(written), len(read))
        row = [*written, *read]
        viewed = any(element_of(end.dtype).viewed is not None for end in (written[0], read[0]))
        launches.setdefault(key, []).append(as_elements(row) if viewed else row)
    return launches


def elements(kernel: Kernel, written: Buffer, read: Buffer) -> tuple[str, str]:
    """The elements of an out and of an input, for a template.

    Raises:
        ValueError: a cast that the kernel has no template for.
    """
    to, of = element_of(written.dtype), element_of(read.dtype)
    if written.dtype != read.dtype and not _casts(kernel, to, of):
        raise ValueError(f"{kernel.name}: {read} is not cast to {written}")
    return to.name, of.name


def _casts(kernel: Kernel, to: Element, of: Element) -> bool:
    """Whether two *different* dtypes fit: one element seen as two dtypes is never converted."""
    pair = (to.name, of.name)
    return (
        to.lanes == of.lanes
        and to.name != of.name
        and any(template[:2] == pair for template in kernel.templates)
    )
