"""The flags of exact sums: queues their copies to the host, and warns once these are done.

A kernel sets the flag of a tensor if its sum did not fit into the words (``ops.add_words``). No
call waits for flags: the first host wait, take or checkpoint that finds a copy done reads it.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gradreduce.device.log.op_log import Record
from gradreduce.device.memory.buffer import Block, Buffer
from gradreduce.device.order.order import Work
from gradreduce.errors import InexactSumWarning

from .backend import HostCopy

# Flags on their way to the host; the name of each tensor, and the place of its flag among them.
_Flags = tuple[HostCopy, list[tuple[str, int]]]


class InexactSums:
    """The flags of one mesh.

    Attributes:
        copies: the flags that nobody has read yet.
        report: called with the names of the tensors whose flags are set.
    """

    def __init__(self) -> None:
        self.copies: deque[_Flags] = deque()
        self.report: Callable[[Iterable[str]], None] = warn_inexact

    def add(self, flags: Sequence[tuple[str, Buffer]]) -> None:
        """Queues copies of flags to the host: one for each block of memory.

        Args:
            flags: the name of each tensor, and its flag: an int32, on the device that set it.
        """
        by_block: dict[Block, list[tuple[str, Buffer]]] = {}
        for name, flag in flags:
            by_block.setdefault(flag.block, []).append((name, flag))
        for inside in by_block.values():
            first = min([flag for _, flag in inside], key=lambda flag: flag.offset)
            places = [(flag.offset - first.offset) // flag.dtype.itemsize for _, flag in inside]
            span = Buffer(first.block, first.offset, (max(places) + 1,), first.dtype)
            names = [name for name, _ in inside]
            self.copies.append((queue_download(span), list(zip(names, places, strict=True))))

    def warn(self) -> None:
        """Reports the sums whose flags are on the host and set; hold no lock."""
        inexact: dict[str, None] = {}  # several devices may have flags of one tensor
        for _ in range(len(self.copies)) if self.copies else ():
            try:
                copy = read, names = self.copies.popleft()
            except IndexError:  # another thread has read them
                break
            flags = read()
            if flags is None:
                self.copies.append(copy)
            else:
                inexact.update({name: None for name, place in names if flags[place]})
        if inexact:
            self.report(inexact)


def warn_inexact(names: Iterable[str]) -> None:
    """Warns of each of these tensors that its sum did not fit into its words; hold no lock."""
    for name in names:
        warnings.warn(
            f"the exact sum of {name!r} did not fit into its words, or overflowed on the way: "
            "its bits may depend on the order of the terms. Pass a larger words=",
            InexactSumWarning,
            stacklevel=_level_of_caller(),
        )


def queue_download(buffer: Buffer) -> HostCopy:
    """Queues a copy of a small Buffer to the host, and waits for nothing.

    A step that is being prepared does not repeat it. The Buffer may be dropped before the copy is
    done.

    Returns:
        A function that returns the copy; None if the compute queue has not passed it yet.
    """
    device = buffer.device
    command, read = device._make_download(buffer)
    record = Record("download", "flags of exact sums", device.index, -1, buffer.nbytes)
    device._submit(command, record, Work(device.compute, [(buffer,)], 0), is_repeated=False)
    return read


def _level_of_caller() -> int:
    """Returns the ``stacklevel`` by which the calling function warns at the line of the user."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("gradreduce.") and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level
