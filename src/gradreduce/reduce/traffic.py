"""The bytes that operations move, by device and link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradreduce.device.collective import bytes_sent
from gradreduce.device.command_list import Operation


@dataclass(frozen=True)
class Traffic:
    """Bytes that operations move, by device and link.

    Attributes:
        read: physical device -> bytes that any device reads in its memory.
        written: physical device -> bytes that any device writes in its memory.
        links: (from, to) of physical devices -> bytes; a collective counts as a ring.
        exchanged: physical device -> bytes that it sends to other processes.
    """

    read: Counter[int] = field(default_factory=Counter)
    written: Counter[int] = field(default_factory=Counter)
    links: Counter[tuple[int, int]] = field(default_factory=Counter)
    exchanged: Counter[int] = field(default_factory=Counter)

    @property
    def memory(self) -> Counter[int]:
        """Returns the bytes read and written in the memory of each physical device."""
        return self.read + self.written

    @property
    def sent(self) -> Counter[int]:
        """Returns the bytes that each physical device sends to other devices and processes."""
        total = self.exchanged.copy()
        for (source, _), nbytes in self.links.items():
            total[source] += nbytes
        return total


def add_traffic(total: Traffic, operation: Operation, mesh: Sequence[int]) -> None:
    """Adds the bytes that an operation moves; a collective uses the links of a ring.

    Args:
        total: the traffic, which is changed.
        operation: the operation.
        mesh: the physical device of each logical device.
    """
    record, rows = operation.records[0], operation.rows
    # A copy may run on either of its two devices; the destination's memory is written.
    home = rows[0][0].device.physical if record.kind == "copy" else mesh[record.device]
    for row in rows:
        for index, buffer in enumerate(row):
            there, is_written = buffer.device.physical, index < operation.num_written
            (total.written if is_written else total.read)[there] += buffer.nbytes
            if there != home and record.kind != "collective":
                total.links[(home, there) if is_written else (there, home)] += buffer.nbytes
    if record.kind == "collective":
        ring = [row[0].device.physical for row in rows]
        sent = bytes_sent(record.name, record.nbytes, len(ring))
        for link in zip(ring, [*ring[1:], ring[0]], strict=True) if sent else ():
            total.links[link] += sent
    elif record.kind == "exchange":
        total.exchanged[home] += record.nbytes
