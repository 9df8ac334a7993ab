"""Finds the flat buffer that an array of another library is a part of.

The search compares addresses only: it works for arrays and views of any library.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from weakref import ref

from .buffer import Block


class ExternalBuffers:
    """The flat buffers of one mesh, found by address.

    Live blocks do not overlap, so an address belongs to at most one of them. A freed block, or one
    that another thread is freeing, is not found. Memory that was freed and allocated again is
    therefore not taken for the old block.

    Attributes:
        is_used: whether a flat buffer was ever added.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held to add blocks; finding and freeing need none
        # Sorted by address; replaced as a whole, so that readers need no lock.
        self._known: tuple[list[int], list[ref[Block]]] = ([], [])
        self.is_used = False

    def add(self, *blocks: Block) -> None:
        """Adds blocks, without keeping them alive, and removes freed ones."""
        with self._lock:
            live = [block for block in (each() for each in self._known[1]) if block is not None]
            live += blocks
            live.sort(key=lambda block: block.address)
            self.is_used = True
            self._known = ([block.address for block in live], [ref(block) for block in live])

    def find(self, address: int, nbytes: int) -> Block | None:
        """Returns the block that contains all of this memory, or None."""
        starts, blocks = self._known
        index = bisect_right(starts, address) - 1
        if index < 0 or not nbytes:
            return None
        block = blocks[index]()
        if block is not None and address + nbytes <= block.address + block.nbytes:
            return block
        return None
