"""Which operations of which queues have used a block last; what an operation must wait for."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.memory.buffer import Queue

MAX_RANGES = 16  # of a block that are tracked separately
END = sys.maxsize  # the end of every block's last range


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


SubmitCounts = dict["DeviceQueue", float]
_Last = Mapping["DeviceQueue", Use]
_Range = tuple[int, _Last, _Last]


class DeviceQueue:
    """One queue of a physical device, shared by its logical devices.

    A compute queue is the home of the blocks of its GPU. It also stands for the uses of a block
    that no other queue has used: it has the methods of ``Uses``.

    Attributes:
        device: one of these devices.
        name: ``compute`` or ``transfer``.
        submitted: grows before and after each operation. So a mark that was made while another
            thread or a signal handler was submitting one does not count as behind it.
        waited_for_caller: ``submitted`` after the queue last waited for a caller's stream.
        shared_uses: the last use by each other queue of memory that callers share, since this queue
            last waited for these uses.
    """

    def __init__(self, device: Device, name: Queue) -> None:
        self.device = device
        self.name: Queue = name
        self.submitted = 0
        self.waited_for_caller = 0
        self.shared_uses: dict[DeviceQueue, Use] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the physical device has failed."""
        return self.device.physical in self.device.mesh_state.failed

    @property
    def home(self) -> DeviceQueue:
        """See ``Uses``."""
        return self

    def before(self, start: int, stop: int, *, is_written: bool) -> list[Use]:
        """See ``Uses.before``."""
        return [Use(self, self.submitted)]

    def after(self, start: int, stop: int, use: Use, *, is_written: bool) -> Uses | DeviceQueue:
        """See ``Uses.after``."""
        return Uses.of_present_work(self, [self]).after(start, stop, use, is_written=is_written)

    def counts(self) -> SubmitCounts:
        """See ``Uses.counts``."""
        return {self: self.submitted}


class Uses:
    """The last uses of a block that not only its GPU's compute queue has used.

    Never changed: blocks with the same uses share one. The block is divided into ranges. All bytes
    of a range have the same last uses: the operations that wrote them last (one, or one of each
    queue if ranges were joined), and the last operation of each queue that has read them since.

    Attributes:
        home: the compute queue of the block's GPU.
        ranges: for each range its first byte, the writes and the reads. It ends where the next one
            begins.
    """

    __slots__ = ("home", "ranges")

    def __init__(self, home: DeviceQueue, ranges: list[_Range]) -> None:
        self.home = home
        self.ranges = ranges

    @classmethod
    def of_present_work(cls, home: DeviceQueue, queues: Iterable[DeviceQueue]) -> Uses:
        """Returns uses of a whole block by all work that these queues have now."""
        writes = {queue: Use(queue, queue.submitted) for queue in queues}
        return cls(home, [(0, writes, {})])

    def before(self, start: int, stop: int, *, is_written: bool) -> list[Use]:
        """Returns what an operation on these bytes must wait for.

        That excludes reads of a failed device: nobody uses their results, and they may never end.
        """
        uses: list[Use] = []
        first, last = bisect_left(self.ranges, (start + 1,)) - 1, bisect_left(self.ranges, (stop,))
        for _, wrote, read in self.ranges[first:last]:
            uses += wrote.values()
            if is_written:
                uses += [use for use in read.values() if not use.queue.has_failed]
        return uses

    def after(self, start: int, stop: int, use: Use, *, is_written: bool) -> Uses | DeviceQueue:
        """Returns the uses after an operation on these bytes, which waits as ``before`` says."""
        queue, ranges = use.queue, self.ranges.copy()
        first, last = _cut(ranges, start), _cut(ranges, stop)
        if is_written:
            ranges[first:last] = [(start, {queue: use}, {})]
        else:
            ranges[first:last] = [
                (begin, wrote, {**read, queue: use}) for begin, wrote, read in ranges[first:last]
            ]
        if queue is self.home and all(
            other is queue for _, wrote, read in ranges for other in (*wrote, *read)
        ):
            return queue
        return Uses(self.home, ranges if len(ranges) <= MAX_RANGES else [_merge(ranges)])

    def counts(self) -> SubmitCounts:
        """Returns the queues that used the block last, each with the count of its last use."""
        return counts_of(
            [use for each in self.ranges for last in each[1:] for use in last.values()]
        )


def counts_of(uses: Iterable[Use]) -> SubmitCounts:
    """Returns the largest count of each queue."""
    counts: SubmitCounts = {}
    for use in uses:
        counts[use.queue] = max(use.count, counts.get(use.queue, 0))
    return counts


def _cut(ranges: list[_Range], at: int) -> int:
    """Makes a range begin at this byte; returns its index."""
    index = bisect_left(ranges, (at,))
    if at < END and (index == len(ranges) or ranges[index][0] != at):
        ranges.insert(index, (at, *ranges[index - 1][1:]))
    return index


def _merge(ranges: Iterable[_Range]) -> _Range:
    """Returns one range for all bytes, with the last use of each queue."""
    writes: dict[DeviceQueue, Use] = {}
    reads: dict[DeviceQueue, Use] = {}
    for _, wrote, read in ranges:
        for into, last in ((writes, wrote), (reads, read)):
            for queue, use in last.items():
                if queue not in into or into[queue].count < use.count:
                    into[queue] = use
    return 0, writes, reads
