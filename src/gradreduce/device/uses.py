"""The last uses of a block by the queues of several GPUs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .buffer import Queue
    from .device import Device

MAX_RANGES = 16  # of a block that are tracked separately
END = sys.maxsize  # the end of every block's last range


class DeviceQueue:
    """One queue of a physical device, shared by its logical devices.

    Attributes:
        device: one of these devices.
        name: ``compute`` or ``transfer``.
        submitted: grows before and after each operation. So a mark that was made while another
            thread or a signal handler was submitting one does not count as behind it.
        entered: ``submitted`` after the queue last waited for a caller's stream.
        debts: the last use of callers' memory by each other queue, since a caller's stream last
            waited for this queue.
    """

    def __init__(self, device: Device, name: Queue) -> None:
        self.device = device
        self.name: Queue = name
        self.submitted = 0
        self.entered = 0
        self.debts: dict[DeviceQueue, Use] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the physical device has failed."""
        return self.device.physical in self.device.mesh_state.failed


class Use:
    """An operation that uses memory.

    Attributes:
        queue: its queue.
        count: ``submitted`` of the queue after it; infinite while it is being submitted, and if
            Ctrl-C interrupted that.
    """

    __slots__ = ("count", "queue")

    def __init__(self, queue: DeviceQueue, count: float = math.inf) -> None:
        self.queue = queue
        self.count = count


Counts = dict[DeviceQueue, float]


class Range(NamedTuple):
    """Bytes of a block with the same last uses.

    Attributes:
        start: the first byte.
        stop: one past the last byte.
        writes: the operations that wrote it last: one, or one of each queue if ranges were joined.
        reads: the last operation of each queue that has read it since.
    """

    start: int
    stop: int
    writes: Mapping[DeviceQueue, Use]
    reads: Mapping[DeviceQueue, Use]


class Uses:
    """The last uses of a block that not only its GPU's compute queue has used.

    Never changed: blocks with the same uses share one.

    Attributes:
        ranges: the ranges of the block.
    """

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = tuple(ranges)

    @classmethod
    def by(cls, queues: Iterable[DeviceQueue]) -> Uses:
        """Returns uses of a whole block by the present work of these queues."""
        writes = {queue: Use(queue, queue.submitted) for queue in queues}
        return cls([Range(0, END, writes, {})])

    def before(self, start: int, stop: int, *, writes: bool) -> list[Use]:
        """Returns what an operation on these bytes must wait for.

        That excludes reads of a failed device: nobody uses their results, and they may never end.
        """
        found: list[Use] = []
        for each in self.ranges:
            if each.start < stop and start < each.stop:
                found += each.writes.values()
                if writes:
                    found += [use for use in each.reads.values() if not use.queue.has_failed]
        return found

    def after(self, start: int, stop: int, use: Use, *, writes: bool) -> Uses:
        """Returns the uses after an operation on these bytes, which waits as ``before`` says."""
        ranges: list[Range] = []
        for each in self.ranges:
            begin, end, wrote, read = each
            if end <= start or stop <= begin:
                ranges.append(each)
                continue
            if begin < start:
                ranges.append(Range(begin, start, wrote, read))
            if stop < end:
                ranges.append(Range(stop, end, wrote, read))
            if not writes:
                inside = max(begin, start), min(end, stop)
                ranges.append(Range(*inside, wrote, {**read, use.queue: use}))
        if writes:
            ranges.append(Range(start, stop, {use.queue: use}, {}))
        return Uses(ranges if len(ranges) <= MAX_RANGES else [_joined(ranges)])

    @property
    def queues(self) -> Counts:
        """The queues that used the block last, each with the count of its last use."""
        uses = [use for each in self.ranges for last in each[2:] for use in last.values()]
        return counts_of(uses)


def counts_of(uses: Iterable[Use]) -> Counts:
    """Returns the largest count of each queue."""
    counts: Counts = {}
    for use in uses:
        counts[use.queue] = max(use.count, counts.get(use.queue, 0))
    return counts


def _joined(ranges: Iterable[Range]) -> Range:
    """Returns one range for all bytes, with the last use of each queue."""
    writes: dict[DeviceQueue, Use] = {}
    reads: dict[DeviceQueue, Use] = {}
    for each in ranges:
        for into, last in ((writes, each.writes), (reads, each.reads)):
            for queue, use in last.items():
                if queue not in into or into[queue].count < use.count:
                    into[queue] = use
    return Range(0, END, writes, reads)
