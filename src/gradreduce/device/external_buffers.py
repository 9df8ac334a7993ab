"""Finds the flat buffer that an array of another library is a part of.

An array that lies in one of them is known by its address alone, whichever library made it and
however often it was viewed since.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from weakref import ref

from .buffer import Block


class ExternalBuffers:
    """The flat buffers of one mesh, found by address.

    Memory that lies in a live block is that block's: two live blocks share none, and the block
    keeps its own. A freed block, or one being freed in another thread, is never found, so memory
    that was freed and allocated again is not taken for the old.

    Attributes:
        is_used: whether there ever was one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # for adding; blocks are freed, and looked up, without
        # In the order of their addresses; replaced as a whole, so that a reader needs no lock.
        self._known: tuple[list[int], list[ref[Block]]] = ([], [])
        self.is_used = False

    def add(self, *blocks: Block) -> None:
        """Adds blocks, for as long as they live, and removes freed ones."""
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
