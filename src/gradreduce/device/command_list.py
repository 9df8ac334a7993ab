"""Records the commands of one thread, so that they can be submitted again.

A reduction runs once while a command list is open. The list keeps each launch, copy, wait and
collective as a function that submits it again with the same arguments, tables and memory. A replay
allocates nothing, checks no operand and builds no table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .buffer import Block, Buffer, Mark, Queue, Row
from .op_log import OpLog, Record

if TYPE_CHECKING:
    from .device import Device
    from .mesh_state import MeshState

Command = Callable[[], None]


class WrittenSpans:
    """The memory that repeated work writes: one span of bytes for each block.

    Args:
        written: the buffers that the work writes, on compute queues.
    """

    def __init__(self, written: Iterable[Buffer]) -> None:
        self._spans: dict[Block, tuple[int, int]] = {}  # first address, and one past the last
        self._seen: object = None  # the mesh's last copy at the last call
        for part in written:
            start = part.address
            low, high = self._spans.get(part.block, (start, start))
            self._spans[part.block] = min(low, start), max(high, start + part.nbytes)

    def wait_for_readers(self, mesh_state: MeshState) -> None:
        """Makes the blocks' compute queues wait for copies that still read the spans."""
        seen = mesh_state.last_read
        if self._seen is seen:
            return
        for block, (start, stop) in self._spans.items():
            for mark in block.readers_between(start - block.address, stop - block.address):
                block.device.wait(mark)
        self._seen = seen  # at the end: Ctrl-C may end the loop


class Operation(NamedTuple):
    """One submitted command, which can be submitted again; keeps its operands alive.

    Attributes:
        command: submits the operation again.
        records: its records in the log: one, none for a wait, one for each rank of a collective.
        rows: the operands; for a collective one row for each rank.
        num_written: the number of operands in each row that are written; they come first.
    """

    command: Command
    records: Sequence[Record] = ()
    rows: Sequence[Row] = ()
    num_written: int = 0


class _MarkAgain:
    """Makes a mark in each replay.

    Attributes:
        mark: the mark of the last replay.
        is_waited_for: whether an operation waits for the mark.
    """

    def __init__(self, mark: Mark) -> None:
        self.first = mark
        self.mark = mark
        self.is_waited_for = False

    def __call__(self) -> None:
        device, queue = self.first.device, self.first.queue
        self.mark = Mark(device, queue, device._mark(queue))


class CommandList:
    """The operations that a thread submitted while this was open, in order.

    A replay does not wait for marks that were made before the list was opened. The caller makes the
    replay wait for earlier work, and for the previous replay.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._marks: dict[int, _MarkAgain] = {}

    def add(
        self,
        command: Command,
        records: Sequence[Record] = (),
        rows: Sequence[Row] = (),
        num_written: int = 0,
    ) -> None:
        """Appends an ``Operation``."""
        self.operations.append(Operation(command, records, rows, num_written))

    def marked(self, mark: Mark) -> None:
        """Records a mark that has just been made."""
        self._marks[id(mark)] = again = _MarkAgain(mark)
        self.add(again)

    def waited(self, device: Device, mark: Mark, queue: Queue) -> None:
        """Records a wait, unless the mark was made before this list was opened."""
        again = self._marks.get(id(mark))
        if again is not None:
            again.is_waited_for = True
            self.add(lambda: device._wait(again.mark, queue))

    def close(self) -> None:
        """Drops the marks that nothing waited for."""
        self.operations = [
            each
            for each in self.operations
            if not isinstance(each.command, _MarkAgain) or each.command.is_waited_for
        ]
        self._marks.clear()

    def run(self) -> None:
        """Submits all operations again, in order; logs nothing."""
        for operation in self.operations:
            operation.command()

    def replay(self, log: OpLog) -> None:
        """Submits and logs all operations again, in order."""
        is_traced = log.num_traces > 0
        for command, records, _, _ in self.operations:
            if is_traced:
                log.thread.started = time.perf_counter_ns()
            command()
            for record in records:
                log.repeat(record)
