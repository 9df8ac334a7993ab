"""Where the memory of the fake GPUs lies, who owns which bytes of it, and who used them last.

One stretch of host memory for the whole process: so many bytes for each GPU, then pinned memory.
Addresses are real, so that kernels built for the host run on them.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from dataclasses import dataclass, field

__all__ = ["GPU_BYTES", "NUM_GPUS", "PINNED", "REGION", "Cell", "Generation", "Heap", "Slot"]

NUM_GPUS = 10
GPU_BYTES = 96 << 20
PINNED = NUM_GPUS  # the number of the stretch that holds pinned host memory
REGION_BYTES = (NUM_GPUS + 1) * GPU_BYTES
GRANULE = 512  # bytes; what CuPy's pool rounds to
GAP = 512  # bytes between two slots that belong to nobody, so that an overrun is seen


class Region:
    """The stretch of memory; pages come into being when they are touched."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.map = mmap.mmap(-1, REGION_BYTES, flags=flags)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.end = self.start + REGION_BYTES

    def place(self, address: int) -> int:
        """Which GPU's memory an address lies in; ``PINNED`` for pinned, -1 for any other."""
        if self.start <= address < self.end:
            return (address - self.start) // GPU_BYTES
        return -1

    def forget(self) -> None:
        """Gives every page back to the system."""
        self.map.madvise(mmap.MADV_DONTNEED)


REGION = Region()
# (queue, number in that queue, what): the user of some bytes
User = tuple[object, int, str]


@dataclass
class Cell:
    """Bytes of a slot that were used alike: the last write, and the reads since."""

    start: int
    end: int
    write: User | None = None
    reads: dict[object, User] = field(default_factory=dict)


@dataclass
class Generation:
    """One owner of a slot.

    Attributes:
        nbytes: that were asked for; what lies behind them is nobody's.
        born: number of the first call that may use it.
        died: number of the first call that may not.
    """

    nbytes: int
    born: int
    died: float = float("inf")


class Slot:
    """A place for one allocation, used again by later ones of its size.

    Attributes:
        place: the GPU, or ``PINNED``.
        start: address.
        capacity: bytes.
        generations: its owners, oldest first.
        cells: what was done with its bytes, in order of address.
    """

    def __init__(self, place: int, start: int, capacity: int) -> None:
        self.place = place
        self.start = start
        self.capacity = capacity
        self.generations: list[Generation] = []
        self.cells = [Cell(start, start + capacity)]

    def owner(self, number: int) -> Generation | None:
        """Whose it was when call ``number`` was made."""
        for generation in reversed(self.generations):
            if generation.born <= number < generation.died:
                return generation
        return None

    def cut(self, start: int, end: int) -> list[Cell]:
        """The cells that make up exactly these bytes; cells are split where they must be."""
        first = bisect_right(self.cells, start, key=lambda cell: cell.start) - 1
        last = bisect_right(self.cells, end - 1, key=lambda cell: cell.start)
        found = []
        for cell in self.cells[first:last]:
            for at in (start, end):
                if cell.start < at < cell.end:
                    found.append(Cell(cell.start, at, cell.write, dict(cell.reads)))
                    cell = Cell(at, cell.end, cell.write, dict(cell.reads))
            found.append(cell)
        self.cells[first:last] = found
        return [cell for cell in found if start <= cell.start and cell.end <= end]


class Heap:
    """The slots of one machine."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {place: [] for place in range(NUM_GPUS + 1)}
        self._free: dict[tuple[object, int, int], list[Slot]] = {}

    def take(self, pool: object, place: int, nbytes: int) -> tuple[Slot, bool]:
        """A slot of ``pool`` for ``nbytes``, and whether it is a new one."""
        capacity = max(1, -(-nbytes // GRANULE)) * GRANULE
        free = self._free.get((pool, place, capacity))
        if free:
            return free.pop(), False
        slots = self._slots[place]
        base = REGION.start + place * GPU_BYTES
        start = slots[-1].start + slots[-1].capacity + GAP if slots else base + GAP
        if start + capacity > base + GPU_BYTES:
            raise MemoryError(f"the fake GPU {place} has but {GPU_BYTES} bytes")
        slots.append(Slot(place, start, capacity))
        return slots[-1], True

    def give(self, pool: object, slot: Slot) -> None:
        """Takes a slot back into the pool that it came from."""
        self._free.setdefault((pool, slot.place, slot.capacity), []).append(slot)

    def find(self, address: int) -> Slot | None:
        """The slot that holds an address, or the one before it if that is nobody's."""
        place = REGION.place(address)
        if place < 0:
            return None
        slots = self._slots[place]
        position = bisect_right(slots, address, key=lambda slot: slot.start)
        return slots[position - 1] if position else None
