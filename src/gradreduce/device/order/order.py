"""Orders the operations of different queues by the memory that they read and write.

A queue waits for the last write of each byte that it reads, and for the last write and all later
reads of each byte that it writes, if another queue made them. Every block has a home: the compute
queue of its GPU. A block that only its home has used needs no waits there, because a queue runs its
operations in order; then ``Block.uses`` is the home. When another queue uses the block, it gets
``Uses``: which operations of which queues used its bytes last.

A wait needs a mark, and a mark stands at the present end of its queue. So a wait may also wait for
later work of that queue. Work that must overlap is therefore submitted after the
operations that wait for what was submitted before it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gradreduce.device.failure.waiting import call_under_lock
from gradreduce.device.memory.buffer import Block, Buffer, Mark, Queue, Row

from .uses import END, DeviceQueue, Use, Uses, counts_of

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.mesh_state import MeshState
    from gradreduce.device.run.commands import Command, CommandList

LOOK_SECONDS = 20e-3
_Whole = dict[Uses | DeviceQueue, list[Block]]  # blocks that are used as a whole, by their uses
_Parts = dict[Block, list[Buffer]]  # operands that are part of a block
# Blocks with the same uses, the same bytes of each (first, one past the last), and if written.
_BlockRange = tuple[list[Block], int, int, bool]


class Work(NamedTuple):
    """What an operation uses on one queue.

    Attributes:
        queue: the queue.
        rows: the operands; in each row those that are written come first.
        num_written: the number of operands of each row that are written.
        blocks: the blocks of all operands, if the caller knows them.
        also_read: what the operation reads besides its operands: memory that the compute queue of
            its GPU has written.
    """

    queue: DeviceQueue
    rows: Sequence[Row]
    num_written: int
    blocks: Iterable[Block] = ()
    also_read: Sequence[Buffer] = ()

    def places(self) -> tuple[list[_BlockRange], set[DeviceQueue]]:
        """Returns the bytes that the operation uses, and the homes of blocks that callers share.

        It counts as using all bytes between its first and its last operand in a block. Blocks that
        only this queue has used are left out.
        """
        queue, rows, num_written, blocks, also_read = self
        whole: tuple[_Whole, _Whole] = defaultdict(list), defaultdict(list)
        parts: tuple[_Parts, _Parts] = defaultdict(list), defaultdict(list)
        homes: set[DeviceQueue] = set()
        if blocks and {block.uses for block in blocks} == {queue}:
            return [], homes
        for number, operands in enumerate((*zip(*rows, strict=True), also_read)):
            is_written = number < num_written
            for operand in operands:
                block = operand.block
                uses = block.uses
                if uses is queue:
                    continue
                if operand.nbytes == block.nbytes:
                    whole[is_written][uses].append(block)
                else:
                    parts[is_written][block].append(operand)
                if block.shared:
                    homes.add(uses.home)
        places = [
            (each, 0, END, is_written)
            for is_written in (False, True)
            for each in whole[is_written].values()
        ]
        spans = _spans(parts[False], False) | _spans(parts[True], True)
        places += [
            ([block], start, stop, written) for (block, start, stop), written in spans.items()
        ]
        return places, homes - {queue}


def _spans(parts: _Parts, is_written: bool) -> dict[tuple[Block, int, int], bool]:
    """Returns the bytes of each block that its operands span."""
    spans = {}
    for block, operands in parts.items():
        start = min([each.address for each in operands]) - block.address
        stop = max([each.address + each.nbytes for each in operands]) - block.address
        if start < stop:
            spans[block, start, END if stop == block.nbytes else stop] = is_written
    return spans


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
        waits: the waits of all threads' operations, except those in command lists.
    """

    def __init__(self, mesh_state: MeshState) -> None:
        self.is_needed = True
        self.version = 0
        self.lock = threading.RLock()
        self._mesh_state = mesh_state
        self._thread = mesh_state.thread
        self._queues: dict[tuple[int, Queue], DeviceQueue] = {}
        self.waits = Waits()

    def queue(self, device: Device, name: Queue) -> DeviceQueue:
        """Returns the queue of this name of the device's GPU."""
        return self._queues.setdefault((device.physical, name), DeviceQueue(device, name))

    def run(self, command: Command, works: Sequence[Work]) -> None:
        """Submits a command after the waits that its operands need.

        If a wait of a single work fails, nothing was changed. If the command fails or is
        interrupted, it counts as submitted.
        """
        if self.is_needed:
            self.call_locked(works[0].queue, self._run, command, works)
        else:
            command()

    def call_locked(
        self, queue: DeviceQueue, call: Callable[..., object], *arguments: object
    ) -> None:
        """Makes a call under the lock; raises if the mesh fails before."""
        if self._mesh_state.watchdog is None:
            with self.lock:
                call(*arguments)
        else:
            work = partial(call, *arguments)
            while not call_under_lock(self.lock, LOOK_SECONDS, work):
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
        queue, recorded = work.queue, self._thread.command_list
        if recorded is not None:  # each replay begins with blocks that need no waits
            blocks = {operand.block for operand in chain(*work.rows, work.also_read)}
            with queue.device.mesh_state.recording_commands(None):
                self.wait_for_uses(blocks - recorded.blocks)
            recorded.blocks |= blocks
        places, homes = work.places()
        if not places:
            return None
        # Whole blocks come first, and their reads before their writes: until then blocks with the
        # same uses keep them, so that the first one stands for all.
        before = [Use(home, home.waited_for_caller) for home in homes]
        for (block, *_), start, stop, is_written in places:
            before += block.uses.before(start, stop, is_written=is_written)
        for other, count in counts_of(before).items():
            self.wait(queue, other, count)
        use = Use(queue)
        self.version += 1
        for together, start, stop, is_written in places:
            uses = together[0].uses.after(start, stop, use, is_written=is_written)
            for block in together:
                block.uses = block.remains.uses = uses
        for home in homes:
            home.shared_uses[queue] = use
        self.version += 1
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
        waits = self.waits if recorded is None else recorded.waits
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

        self.call_locked(queue, wait)

    def mark(self, queue: DeviceQueue) -> Mark:
        """Returns a mark of the present end of a queue; takes no lock."""
        covered, mark = self.waits.marks.get(queue, (-1, None))
        return mark if mark and covered == queue.submitted else self.new_mark(queue)

    def new_mark(self, queue: DeviceQueue) -> Mark:
        """Like ``mark``, also while work is submitted again that is not counted one by one."""
        submitted = queue.submitted  # read first: another thread may submit work meanwhile
        mark = Mark(queue.device, queue.name, queue.device._mark(queue.name))
        self.waits.marks[queue] = submitted, mark
        return mark

    def is_behind(self, queue: DeviceQueue, uses: Uses | DeviceQueue) -> bool:
        """Whether later work of ``queue`` runs after all these uses."""
        behind = self.waits.behind
        return all(
            [
                other is queue or behind.get((queue, other), -1) >= count
                for other, count in uses.counts().items()
            ]
        )

    def add_work(self, *queues: DeviceQueue) -> None:
        """Records that queues got work that is no operation on Buffers."""
        self.call_locked(queues[0], self.count, *queues)

    def count(self, *queues: DeviceQueue) -> None:
        """Like ``add_work``; the lock must be held."""
        for queue in queues:
            queue.submitted += 1

    def add_uses(self, blocks: Iterable[Block], queues: Sequence[DeviceQueue]) -> None:
        """Records that queues got work that may use the blocks."""

        def add() -> None:
            self.count(*queues)
            self.version += 1
            for block in blocks:
                home = block.uses.home
                block.uses = block.remains.uses = Uses.of_present_work(home, queues)
                if block.shared:
                    uses = {queue: Use(queue, queue.submitted) for queue in queues}
                    home.shared_uses.update(uses)
            self.version += 1

        self.call_locked(queues[0], add)

    def note_wait_for_caller(self, queue: DeviceQueue) -> None:
        """Records that a compute queue waits for a caller's stream, which may have written."""
        self.call_locked(queue, self._note_wait_for_caller, queue)

    def _note_wait_for_caller(self, queue: DeviceQueue) -> None:
        queue.submitted += 1
        queue.waited_for_caller = queue.submitted

    def wait_for_shared_uses(self, queue: DeviceQueue) -> None:
        """Makes a compute queue wait for all other uses of memory that callers share.

        Devices that have failed are left out: every later call would raise.
        """

        def wait() -> None:
            for other, use in list(queue.shared_uses.items()):
                if not other.has_failed:
                    self.wait(queue, other, use.count)
                if queue.shared_uses.get(other) is use:  # a signal handler may have used it again
                    del queue.shared_uses[other]

        if queue.shared_uses:
            self.call_locked(queue, wait)

    def wait_for_uses(self, blocks: Iterable[Block]) -> None:
        """Makes the compute queue of each block's GPU wait for all other uses of the block."""

        def wait() -> None:
            for uses in {block.uses for block in used}:
                for other, count in counts_of(uses.before(0, END, is_written=True)).items():
                    self.wait(uses.home, other, count)
            for block in used:
                block.uses = block.remains.uses = block.uses.home

        used = [block for block in blocks if block.uses is not block.uses.home]
        if used:
            self.call_locked(used[0].uses.home, wait)


class RepeatedWork:
    """Operations of a recorded list, which are submitted again without ``Order.run``.

    Made while the list is open: the list then ends with the waits that let a replay follow.

    Args:
        devices: the devices that the operations use.
        command_list: the list.
    """

    def __init__(self, devices: Sequence[Device], command_list: CommandList) -> None:
        mesh_state = devices[0].mesh_state
        self._order = mesh_state.order
        self._is_one_process = mesh_state.processes.size == 1
        self._blocks = tuple(command_list.blocks)
        queues = dict.fromkeys(queue for each in devices for queue in each.queues.values())
        self._queues = tuple(queues)
        self._seen = -1  # the order's version when only their compute queues had used the blocks
        self._settle()

    def run(self, command: Command) -> None:
        """Submits the operations by ``command``.

        If that fails, the blocks count as used by all queues.
        """
        if self._is_one_process:
            self._order.call_locked(self._queues[0], self._run, command, self._order.count)
        else:  # it may wait for other processes, without the lock
            self._run(command, self._order.add_work)

    def _run(self, command: Command, count: Callable[..., None]) -> None:
        order, queues = self._order, self._queues
        if order.version != self._seen:
            self._settle()
        try:
            command()
            count(*queues)
        except BaseException:
            order.add_uses(self._blocks, queues)
            raise
        if order.version != self._seen:  # exchanges, or other threads, have used the blocks
            self._settle()

    def _settle(self) -> None:
        version = self._order.version  # read first: another thread may use a block meanwhile
        self._order.wait_for_uses(self._blocks)
        self._seen = version
