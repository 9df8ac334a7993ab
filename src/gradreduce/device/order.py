"""Orders the operations of different queues by the memory that they read and write.

A queue waits for the last operation that wrote what it reads, and for all that used what it writes,
if they are on other queues. Memory that only its own GPU's compute queue has used needs no entry:
that queue runs its operations in order. When another queue uses a block, the block gets ``Uses``.

A wait needs a mark, and a mark stands at the present end of its queue. So a wait may be for more
than the operation that it is needed for. Work that must overlap is therefore submitted after the
operations that wait for what was submitted before it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .buffer import Block, Mark, Queue, Row

if TYPE_CHECKING:
    from .command_list import Command, CommandList
    from .device import Device
    from .op_log import ThreadState

MAX_RANGES = 16  # of a block that are tracked separately


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


_Last = dict[DeviceQueue, Use]  # the last use by each queue


class _Range:
    """Bytes of a block with the same last uses.

    Attributes:
        start: the first byte.
        stop: one past the last byte.
        writes: the operations that wrote it last: one, or one for each queue if ranges were joined.
        reads: the last operation of each queue that has read it since.
    """

    __slots__ = ("reads", "start", "stop", "writes")

    def __init__(self, start: int, stop: int, writes: _Last, reads: _Last) -> None:
        self.start = start
        self.stop = stop
        self.writes = writes
        self.reads = reads


class Uses:
    """The last uses of a block that not only its GPU's compute queue has used."""

    __slots__ = ("_home", "_ranges")

    def __init__(self, home: DeviceQueue, nbytes: int, others: Iterable[DeviceQueue] = ()) -> None:
        self._home = home
        writes = {queue: Use(queue, queue.submitted) for queue in (home, *others)}
        self._ranges = [_Range(0, nbytes, writes, {})]

    def wait_for(
        self, start: int, stop: int, waits: dict[DeviceQueue, float], *, writes: bool
    ) -> None:
        """Adds to ``waits`` what an operation on these bytes must wait for.

        That excludes reads of a failed device: nobody uses their results, and they may never end.
        """
        for each in self._ranges:
            if each.start < stop and start < each.stop:
                uses = [*each.writes.values()]
                if writes:
                    uses += [use for use in each.reads.values() if not use.queue.has_failed]
                _add_counts(uses, waits)

    def add(self, start: int, stop: int, use: Use, *, writes: bool) -> None:
        """Adds an operation on these bytes, which waits for what ``wait_for`` returns."""
        inside = []
        for each in self._ranges:
            if each.start < stop and start < each.stop:
                inside += _cut(each, start, stop)
            else:
                inside.append(each)
        if writes:
            inside = [each for each in inside if not start <= each.start < stop]
            inside.append(_Range(start, stop, {use.queue: use}, {}))
        else:
            for each in inside:
                if start <= each.start < stop:
                    each.reads[use.queue] = use
        self._ranges = [_joined(inside)] if len(inside) > MAX_RANGES else inside

    @property
    def queues(self) -> dict[DeviceQueue, float]:
        """The queues that used the block last, each with the count of its last use."""
        found: dict[DeviceQueue, float] = {}
        for each in self._ranges:
            _add_counts([*each.writes.values(), *each.reads.values()], found)
        return found

    @property
    def is_over(self) -> bool:
        """Whether only the compute queue of the block's GPU has used it last."""
        home = self._home
        return all(
            [queue is home for each in self._ranges for queue in (*each.writes, *each.reads)]
        )


def _add_counts(uses: Iterable[Use], counts: dict[DeviceQueue, float]) -> None:
    """Raises the count of each queue to that of its uses."""
    for use in uses:
        counts[use.queue] = max(use.count, counts.get(use.queue, 0))


def _cut(each: _Range, start: int, stop: int) -> list[_Range]:
    """Cuts a range at ``start`` and ``stop``, where they lie inside it."""
    cuts = [each.start, *(at for at in (start, stop) if each.start < at < each.stop), each.stop]
    if len(cuts) == 2:
        return [each]
    return [
        _Range(begin, end, dict(each.writes), dict(each.reads)) for begin, end in pairwise(cuts)
    ]


def _joined(ranges: Iterable[_Range]) -> _Range:
    """Returns one range for all bytes, with the last use of each queue."""
    whole = _Range(0, 0, {}, {})
    for each in ranges:
        whole.stop = max(whole.stop, each.stop)
        for into, last in ((whole.writes, each.writes), (whole.reads, each.reads)):
            for queue, use in last.items():
                if queue not in into or into[queue].count < use.count:
                    into[queue] = use
    return whole


class _Operand(NamedTuple):
    """Bytes of a block that an operation uses."""

    block: Block
    start: int
    stop: int
    is_written: bool

    def wait_for(self, waits: dict[DeviceQueue, float]) -> None:
        """Adds to ``waits`` which count of each queue the operation must wait for."""
        block, home = self.block, self.block.queue
        if block.uses is None:
            waits[home] = home.submitted
            return
        block.uses.wait_for(self.start, self.stop, waits, writes=self.is_written)
        if block.shared:
            waits[home] = max(home.entered, waits.get(home, 0))

    def record(self, use: Use) -> None:
        """Records that the operation uses the bytes."""
        block, home, uses = self.block, self.block.queue, self.block.uses
        if uses is None:
            uses = Uses(home, block.nbytes)
            block.set_uses(uses)
        uses.add(self.start, self.stop, use, writes=self.is_written)
        if use.queue is not home:
            if block.shared:
                home.debts[use.queue] = use
        elif uses.is_over:
            block.set_uses(None)


class Work(NamedTuple):
    """What an operation uses on one queue.

    Attributes:
        queue: the queue.
        rows: the operands; in each row those that are written come first.
        num_written: the number of operands of each row that are written.
        blocks: the blocks of all operands, if the caller knows them.
    """

    queue: DeviceQueue
    rows: Sequence[Row]
    num_written: int
    blocks: Collection[Block] = ()


class Waits:
    """Waits that were queued, so that none is queued twice.

    Attributes:
        behind: for each queue that has waited and each queue that it waited for, the count.
        marks: for each queue its last mark, and ``submitted`` before the mark.
    """

    def __init__(self) -> None:
        self.behind: dict[tuple[DeviceQueue, DeviceQueue], int] = {}
        self.marks: dict[DeviceQueue, tuple[int, Mark]] = {}


class Order:
    """The order of the operations of one mesh.

    Args:
        thread: the log's state of the calling thread.

    Attributes:
        is_needed: False if an operation is complete when it was submitted; then nothing is tracked.
        version: grows when the uses of a block change.
    """

    def __init__(self, thread: ThreadState) -> None:
        self.is_needed = True
        self.version = 0
        self._thread = thread
        self._queues: dict[tuple[int, Queue], DeviceQueue] = {}
        self._waits = Waits()
        self._lock = threading.RLock()  # held while an operation is ordered and submitted

    def queue(self, device: Device, name: Queue) -> DeviceQueue:
        """Returns the queue of this name of the device's GPU."""
        return self._queues.setdefault((device.physical, name), DeviceQueue(device, name))

    def run(self, command: Command, works: Sequence[Work]) -> None:
        """Submits a command after the waits that its operands need.

        If a wait fails, nothing was changed. If the command fails or is interrupted, it counts as
        submitted.
        """
        with self._lock:
            uses = [self._ready(work) for work in works]
            try:
                for work in works:
                    work.queue.submitted += 1
                command()
            finally:
                for work in works:
                    work.queue.submitted += 1
            for use in uses:
                if use is not None:
                    use.count = use.queue.submitted

    def _ready(self, work: Work) -> Use | None:
        """Queues the waits of an operation, and records it; None if they need no record."""
        queue, rows, num_written, blocks = work
        blocks = blocks or {operand.block for row in rows for operand in row}
        recorded = self._thread.command_list
        if recorded is not None:  # each replay begins with settled blocks
            with queue.device.mesh_state.recording_commands(None):
                self.settle([block for block in blocks if block not in recorded.blocks])
            recorded.blocks.update(blocks)
        if not [1 for block in blocks if block.uses is not None or block.queue is not queue]:
            return None
        operands = [
            _Operand(block, operand.offset, operand.offset + operand.nbytes, at < num_written)
            for row in rows
            for at, operand in enumerate(row)
            for block in (operand.block,)
            if operand.nbytes and (block.uses is not None or block.queue is not queue)
        ]
        waits: dict[DeviceQueue, float] = {}
        for each in operands:
            each.wait_for(waits)
        for other, count in waits.items():
            self.wait(queue, other, count)
        use = Use(queue)
        self.version += 1
        for each in operands:
            each.record(use)
        return use

    def wait(self, queue: DeviceQueue, other: DeviceQueue, count: float) -> None:
        """Makes ``queue`` wait until ``other`` has passed ``count``, unless it does already.

        The lock must be held.

        Raises:
            BackendUnavailableError: the other device has failed.
        """
        if queue is other:
            return
        recorded = self._thread.command_list
        waits = self._waits if recorded is None else recorded.waits
        if waits.behind.get((queue, other), -1) >= count:
            return
        covered, mark = waits.marks.get(other, (-1, None))
        if mark is None or covered < count or other.has_failed:
            covered = other.submitted  # read first: a signal handler may submit work
            mark = other.device.queue_mark(other.name)
            waits.marks[other] = covered, mark
        queue.device.queue_wait(mark, queue=queue.name)
        waits.behind[queue, other] = covered

    def join(self, queue: DeviceQueue, others: Iterable[DeviceQueue]) -> None:
        """Makes ``queue`` wait for the present work of other queues."""
        with self._lock:
            for other in others:
                self.wait(queue, other, other.submitted)

    def event(self, queue: DeviceQueue) -> Any:
        """Returns an event at the present end of a queue; takes no lock."""
        submitted = queue.submitted  # read first: another thread may submit work meanwhile
        covered, mark = self._waits.marks.get(queue, (-1, None))
        if mark is None or covered != submitted:
            mark = Mark(queue.device, queue.name, queue.device._mark(queue.name))
            self._waits.marks[queue] = submitted, mark
        return mark.event

    def last_event(self, queue: DeviceQueue) -> Any:
        """Returns the event of the queue's last mark, or None."""
        _, mark = self._waits.marks.get(queue, (0, None))
        return None if mark is None else mark.event

    def is_behind(self, queue: DeviceQueue, uses: Uses) -> bool:
        """Whether later work of ``queue`` runs after all these uses."""
        behind = self._waits.behind
        return all(
            [
                other is queue or behind.get((queue, other), -1) >= count
                for other, count in uses.queues.items()
            ]
        )

    def add_work(self, *queues: DeviceQueue) -> None:
        """Records that queues got work that is no operation on Buffers."""
        with self._lock:
            for queue in queues:
                queue.submitted += 1

    def add_uses(self, blocks: Iterable[Block], queues: Iterable[DeviceQueue]) -> None:
        """Records that the present work of these queues may use the blocks."""
        with self._lock:
            self.version += 1
            uses = {queue: Use(queue, queue.submitted) for queue in queues}
            for block in blocks:
                block.set_uses(Uses(block.queue, block.nbytes, uses))
                if block.shared:
                    block.queue.debts.update(uses)

    def enter(self, queue: DeviceQueue) -> None:
        """Records that a compute queue waits for a caller's stream, which may have written."""
        with self._lock:
            queue.submitted += 1
            queue.entered = queue.submitted

    def leave(self, queue: DeviceQueue) -> None:
        """Makes a compute queue wait for all other uses of its callers' memory.

        Devices that have failed are left out: every later call would raise.
        """
        if not queue.debts:
            return
        with self._lock:
            for other, use in list(queue.debts.items()):
                if not other.has_failed:
                    self.wait(queue, other, use.count)
                del queue.debts[other]

    def settle(self, blocks: Iterable[Block]) -> None:
        """Makes the compute queue of each block's GPU wait for all other uses of the block."""
        with self._lock:
            for block in blocks:
                if block.uses is not None:
                    waits: dict[DeviceQueue, float] = {}
                    block.uses.wait_for(0, block.nbytes, waits, writes=True)
                    for other, count in waits.items():
                        self.wait(block.queue, other, count)
                    block.set_uses(None)


class RepeatedWork:
    """Operations of a recorded list, which are submitted again without ``Order.run``.

    Made while the list is open: the list then ends with the waits that let a replay follow.

    Args:
        devices: the devices that the operations use.
        command_list: the list.
    """

    def __init__(self, devices: Sequence[Device], command_list: CommandList) -> None:
        self._order = devices[0].mesh_state.order
        self._blocks = tuple(command_list.blocks)
        self._queues = dict.fromkeys(queue for each in devices for queue in each.queues.values())
        self._seen = -1  # the order's version when only their compute queues had used the blocks
        self._settle()

    def run(self, command: Command) -> None:
        """Submits the operations by ``command``; if it fails, any queue may have used the blocks."""
        self._settle()
        is_whole = False
        try:
            self._order.add_work(*self._queues)
            command()
            is_whole = True
        finally:
            self._order.add_work(*self._queues)
            if not is_whole:
                self._order.add_uses(self._blocks, self._queues)
        self._settle()  # exchanges, and other threads meanwhile, have used the blocks

    def _settle(self) -> None:
        version = self._order.version  # read first: another thread may use a block meanwhile
        if self._seen != version:
            self._order.settle(self._blocks)
            self._seen = version
