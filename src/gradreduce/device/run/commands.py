"""Records the commands of one thread, so that they can be submitted again.

A reduction runs once while a command list is open. The list keeps each launch, copy, wait and
collective as a function that submits it again with the same arguments, tables and memory. A replay
allocates nothing, checks no operand and builds no table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gradreduce.device.log.op_log import OpLog, Record
from gradreduce.device.memory.buffer import Block, Mark, Queue, Row
from gradreduce.device.order.order import Waits

if TYPE_CHECKING:
    from gradreduce.device.device import Device

Command = Callable[[], None]


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


class CommandList:
    """The operations that a thread submitted while this was open, in order.

    A replay does not wait for marks that were made before the list was opened. The caller makes the
    replay wait for earlier work, and for the previous replay (``RepeatedWork``).

    Attributes:
        waits: the waits in the list: earlier ones do not count.
        blocks: the blocks that the operations use.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.waits = Waits()
        self.blocks: set[Block] = set()
        # The id of a mark, which ``waits`` keeps -> a list of one: the mark of the last replay.
        self._marks: dict[int, list[Mark]] = {}

    def add(
        self,
        command: Command,
        records: Sequence[Record] = (),
        rows: Sequence[Row] = (),
        num_written: int = 0,
    ) -> None:
        """Appends an ``Operation``."""
        self.operations.append(Operation(command, records, rows, num_written))

    def note_mark(self, mark: Mark) -> None:
        """Records a mark that has just been made, and that each replay makes again."""
        last = self._marks[id(mark)] = [mark]
        device, queue, _ = mark

        def make_again() -> None:
            last[0] = Mark(device, queue, device._mark(queue))

        self.add(make_again)

    def note_wait(self, device: Device, mark: Mark, queue: Queue) -> None:
        """Records a wait for a mark of this list."""
        last = self._marks[id(mark)]
        self.add(lambda: device._wait(last[0], queue))

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
