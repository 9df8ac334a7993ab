"""Whether the operands of a launch fit together; the door of this folder, never launches.

Also looks at operands as the kernels do: complex as pairs, signed integers as unsigned.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradreduce.device import Buffer, element_of

__all__ = ["as_elements", "by_dtype", "check_divisor", "check_row"]


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
            if not allowed and _overlap(target, other):
                raise ValueError(f"{name}: {target} overlaps operand {other_place}, {other}")


def _same(buffer: Buffer, other: Buffer) -> bool:
    return buffer.address == other.address and buffer.nbytes == other.nbytes


def _overlap(buffer: Buffer, other: Buffer) -> bool:
    return (
        buffer.address < other.address + other.nbytes
        and other.address < buffer.address + buffer.nbytes
    )


def check_divisor(name: str, divisor: float, buffer: Buffer) -> None:
    """Integers are added modulo 2**bits; a quotient of that means nothing.

    Raises:
        ValueError: a divisor other than 1 for an integer buffer.
    """
    if divisor != 1 and buffer.dtype.kind in "iu":
        raise ValueError(f"{name}: {buffer.dtype} is not divided (divisor={divisor})")


def by_dtype(
    rows: Sequence[tuple[list[Buffer], list[Buffer]]],
) -> dict[tuple[str, str, int, int], list[list[Buffer]]]:
    """Rows that one launch can serve, together.

    Keyed by the element of the written operands, that of the read ones, and how many of each.
    """
    launches: dict[tuple[str, str, int, int], list[list[Buffer]]] = {}
    for written, read in rows:
        written_element = element_of(written[0].dtype).name
        read_element = element_of(read[0].dtype).name
        key = (written_element, read_element, len(written), len(read))
        launches.setdefault(key, []).append(as_elements([*written, *read]))
    return launches
