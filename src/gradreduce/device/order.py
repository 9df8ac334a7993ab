"""Orders the operations of different queues by the memory that they read and write.

A queue waits for the last write of each byte that it reads, and for the last write and all later
reads of each byte that it writes, if another queue made them. Memory that only its own GPU's
compute queue has used needs no entry: that queue runs its operations in order. When another queue
uses a block, the block gets ``Uses``.

A wait needs a mark, and a mark stands at the present end of its queue. So a wait may also wait for
later work of that queue. Work that must overlap is therefore submitted after the
operations that wait for what was submitted before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .buffer import Block, Mark, Queue, Row
from .uses import END, Counts, DeviceQueue, Use, Uses, counts_of
from .waiting import acquired_in_time

if TYPE_CHECKING:
    from .command_list import Command, CommandList
    from .device import Device
    from .mesh_state import MeshState

LOOK_SECONDS = 20e-3
_Place = tuple[Uses | DeviceQueue, int, int, bool]  # bytes with the same uses, and if written


_Spans = dict[Block, tuple[int, int]]


class Work(NamedTuple):
    """What an operation uses on one queue.

    Attributes:
        queue: the queue.
        rows: the operands; in each row those that are written come first.
        num_written: the number of operands of each row that are written.
        blocks: the blocks of all operands, if the caller knows them. Blocks that only ``queue`` has
            used may be left out.
        version: the order's version at which ``blocks`` was right; -1: it is always.
    """

    queue: DeviceQueue
    rows: Sequence[Row]
    num_written: int
    blocks: Collection[Block] = ()
    version: int = -1

    def spans(self) -> list[tuple[Block, int, int, bool]]:
        """Returns the bytes that the operands span in each block, and whether they are written.

        Leaves out blocks that only this queue has used.
        """
        queue, rows, num_written, *_ = self
        written: _Spans = {}
        read: _Spans = {}
        for row in rows:
            for at, operand in enumerate(row):
                block = operand.block
                if not operand.nbytes or (block.uses is None and block.queue is queue):
                    continue
                found = written if at < num_written else read
                start = operand.address - block.address
                stop = start + operand.nbytes
                if block in found:
                    start, stop = min(start, found[block][0]), max(stop, found[block][1])
                found[block] = start, stop
        return [
            (block, start, END if stop == block.nbytes else stop, found is written)
            for found in (written, read)
            for block, (start, stop) in found.items()
        ]


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

    A thread may hang in the driver while it holds the lock. If the mesh fails, because of a
    deadline, threads that wait for the lock raise its error.

    Args:
        mesh_state: the state of the mesh.

    Attributes:
        is_needed: False if an operation is complete when it was submitted; then nothing is tracked.
        version: grows before and after the uses of blocks change, because a signal handler or
            another thread may look at them meanwhile.
        lock: held while an operation is ordered and submitted.
    """

    def __init__(self, mesh_state: MeshState) -> None:
        self.is_needed = True
        self.version = 0
        self.lock = threading.RLock()
        self._mesh_state = mesh_state
        self._thread = mesh_state.thread
        self._queues: dict[tuple[int, Queue], DeviceQueue] = {}
        self._waits = Waits()

    def queue(self, device: Device, name: Queue) -> DeviceQueue:
        """Returns the queue of this name of the device's GPU."""
        return self._queues.setdefault((device.physical, name), DeviceQueue(device, name))

    def run(self, command: Command, works: Sequence[Work]) -> None:
        """Submits a command after the waits that its operands need.

        If a wait of a single work fails, nothing was changed. If the command fails or is
        interrupted, it counts as submitted.
        """
        self._locked(works[0].queue, self._run, command, works)

    def _locked(self, queue: DeviceQueue, call: Callable[..., object], *arguments: object) -> None:
        """Makes a call under the lock; raises if the mesh fails before."""
        if not self._mesh_state.is_guarded:
            with self.lock:
                call(*arguments)
        else:
            work = partial(call, *arguments)
            while not acquired_in_time(self.lock, LOOK_SECONDS, work):
                self._mesh_state.check_usable(queue.device)

    def _run(self, command: Command, works: Sequence[Work]) -> None:
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
        queue, rows, _, blocks, version = work
        recorded = self._thread.command_list
        if not blocks or version not in (-1, self.version) or recorded is not None:
            blocks = {operand.block for row in rows for operand in row}
        if recorded is not None:  # each replay begins with settled blocks
            with queue.device.mesh_state.recording_commands(None):
                self.settle([block for block in blocks if block not in recorded.blocks])
            recorded.blocks.update(blocks)
        if not [1 for block in blocks if block.uses is not None or block.queue is not queue]:
            return None
        spans = work.spans()
        for other, count in self._counts_before(spans).items():
            self.wait(queue, other, count)
        use = Use(queue)
        self.version += 1
        made: dict[_Place, Uses | None] = {}
        for block, start, stop, writes in spans:
            home = block.queue
            place = block.uses or home, start, stop, writes
            if place not in made:
                made[place] = _after(block, use, start, stop, writes)
            block.set_uses(made[place])
            if block.shared and queue is not home:
                home.debts[queue] = use
        self.version += 1
        return use

    def _counts_before(self, spans: Iterable[tuple[Block, int, int, bool]]) -> Counts:
        """Returns which count of each queue an operation must wait for."""
        found: list[Use] = []
        seen: set[_Place] = set()
        for block, start, stop, writes in spans:
            home, uses = block.queue, block.uses
            place = uses or home, start, stop, writes
            if place not in seen:
                seen.add(place)
                if uses is None:
                    found.append(Use(home, home.submitted))
                else:
                    found += uses.before(start, stop, writes=writes)
            if block.shared:
                found.append(Use(home, home.entered))
        return counts_of(found)

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

        def wait() -> None:
            for other in others:
                self.wait(queue, other, other.submitted)

        self._locked(queue, wait)

    def mark(self, queue: DeviceQueue) -> Mark:
        """Returns a mark of the present end of a queue; takes no lock."""
        covered, mark = self._waits.marks.get(queue, (-1, None))
        return mark if mark and covered == queue.submitted else self.new_mark(queue)

    def new_mark(self, queue: DeviceQueue) -> Mark:
        """Like ``mark``, also while work is submitted again that is not counted one by one."""
        submitted = queue.submitted  # read first: another thread may submit work meanwhile
        mark = Mark(queue.device, queue.name, queue.device._mark(queue.name))
        self._waits.marks[queue] = submitted, mark
        return mark

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
        self._locked(queues[0], self._count, queues)

    def _count(self, queues: Iterable[DeviceQueue]) -> None:
        for queue in queues:
            queue.submitted += 1

    def add_uses(self, blocks: Iterable[Block], queues: Sequence[DeviceQueue]) -> None:
        """Records that the present work of these queues may use the blocks."""

        def add() -> None:
            self.version += 1
            uses = Uses.by(queues)
            for block in blocks:
                block.set_uses(uses)
                if block.shared:
                    block.queue.debts.update(uses.ranges[0].writes)
            self.version += 1

        self._locked(queues[0], add)

    def enter(self, queue: DeviceQueue) -> None:
        """Records that a compute queue waits for a caller's stream, which may have written."""
        self._locked(queue, self._enter, queue)

    def _enter(self, queue: DeviceQueue) -> None:
        queue.submitted += 1
        queue.entered = queue.submitted

    def leave(self, queue: DeviceQueue) -> None:
        """Makes a compute queue wait for all other uses of its callers' memory.

        Devices that have failed are left out: every later call would raise.
        """

        def wait() -> None:
            for other, use in list(queue.debts.items()):
                if not other.has_failed:
                    self.wait(queue, other, use.count)
                if queue.debts.get(other) is use:  # a signal handler may have used it again
                    del queue.debts[other]

        if queue.debts:
            self._locked(queue, wait)

    def settle(self, blocks: Iterable[Block]) -> None:
        """Makes the compute queue of each block's GPU wait for all other uses of the block."""
        used = [block for block in blocks if block.uses is not None]
        if used:
            self._locked(used[0].queue, self._settle, used)

    def _settle(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.uses is not None:
                uses = block.uses.before(0, END, writes=True)
                for other, count in counts_of(uses).items():
                    self.wait(block.queue, other, count)
                block.set_uses(None)


def _after(block: Block, use: Use, start: int, stop: int, writes: bool) -> Uses | None:
    """Returns a block's uses after an operation on these bytes."""
    home = block.queue
    uses = block.uses or Uses.by([home])
    uses = uses.after(start, stop, use, writes=writes)
    return None if use.queue is home and set(uses.queues) == {home} else uses


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
        queues = dict.fromkeys(queue for each in devices for queue in each.queues.values())
        self._queues = tuple(queues)
        self._seen = -1  # the order's version when only their compute queues had used the blocks
        self._settle()

    def run(self, command: Command) -> None:
        """Submits the operations by ``command``.

        If that fails, the blocks count as used by all queues.
        """
        order, queues = self._order, self._queues
        if order.version != self._seen:
            self._settle()
        try:
            command()
            order.add_work(*queues)
        except BaseException:
            order.add_work(*queues)
            order.add_uses(self._blocks, queues)
            raise
        if order.version != self._seen:  # exchanges, or other threads, have used the blocks
            self._settle()

    def _settle(self) -> None:
        version = self._order.version  # read first: another thread may use a block meanwhile
        self._order.settle(self._blocks)
        self._seen = version
