"""Records the commands of one thread, so that they can be submitted again.

A reduction runs once while a command list is open. Each launch, copy, wait and collective is kept
as a function that submits it again, with the arguments, tables and memory of the first time: to
replay the list allocates nothing, checks no operand and builds no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .buffer import Block, Buffer, Mark, Queue
from .op_log import Record, Sink

if TYPE_CHECKING:
    from .device import Device

Command = Callable[[], None]


# A block, and the first and last byte in it that work which is submitted again may write.
Span = tuple[Block, int, int]


def spans_of(written: Iterable[Buffer]) -> list[Span]:
    """Returns one span for each block, which covers all that is written there."""
    spans: dict[int, Span] = {}
    for part in written:
        block, start, stop = part.block, part.offset, part.offset + part.nbytes
        _, low, high = spans.get(id(block), (block, start, stop))
        spans[id(block)] = (block, min(low, start), max(high, stop))
    return list(spans.values())


def wait_for_readers(spans: Iterable[Span]) -> None:
    """Makes the blocks' compute queues wait for copies that still read these spans."""
    for block, start, stop in spans:
        for mark in block.readers_between(start, stop):
            block.device.wait(mark)


class CommandList:
    """The commands that a thread submitted while this was open, in order.

    Marks made before it was opened are not waited for when it is replayed: whoever replays it says
    what comes before, and replays it only behind itself (``join`` at its end does that).
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Command, tuple[Record, ...]]] = []
        self._kept: dict[int, Any] = {}  # blocks, alive as long as the list
        # id of a mark -> the mark, where its event is at each replay, its place, whether waited for
        self._marks: dict[int, tuple[Mark, list[Any], int]] = {}
        self._waited: set[int] = set()

    def add(
        self, command: Command, records: tuple[Record, ...], operands: Iterable[Buffer]
    ) -> None:
        """Appends a command to replay later, its records, and the memory it uses."""
        self._entries.append((command, records))
        for operand in operands:
            self._kept[id(operand.block)] = operand.block

    def marked(self, mark: Mark) -> None:
        """Records a mark that has just been made."""
        cell = [mark.event]

        def again() -> None:
            cell[0] = mark.device._mark(mark.queue)

        self._marks[id(mark)] = (mark, cell, len(self._entries))
        self._entries.append((again, ()))

    def waited(self, device: Device, mark: Mark, queue: Queue) -> None:
        """Records a wait, unless its mark is older than this list."""
        if id(mark) not in self._marks:
            return
        _, cell, index = self._marks[id(mark)]
        self._waited.add(index)

        def again() -> None:
            device._wait(Mark(mark.device, mark.queue, cell[0]), queue)

        self._entries.append((again, ()))

    def close(self) -> None:
        """Drops the marks that nothing waited for."""
        idle = {index for _, _, index in self._marks.values()} - self._waited
        self._entries = [each for index, each in enumerate(self._entries) if index not in idle]
        self._marks.clear()

    def replay(self, recorder: Sink) -> None:
        """Submits all commands again, in order."""
        for command, records in self._entries:
            command()
            if records:
                recorder.replayed(records)
