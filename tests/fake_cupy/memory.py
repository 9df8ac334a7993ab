"""The memory of the fake GPUs: who owns which bytes, and who used them last.

One range of host memory for the whole process: a fixed size per GPU, then pinned memory. Addresses
are real, so that kernels compiled for the CPU can use them.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from dataclasses import dataclass, field

NUM_GPUS = 10
GPU_BYTES = 96 << 20
PINNED = NUM_GPUS  # the number of the range for pinned host memory
REGION_BYTES = (NUM_GPUS + 1) * GPU_BYTES
GRANULE = 512  # bytes; CuPy's pool rounds to this
GAP = 512  # unused bytes between two slots, so that overruns are found


class Region:
    """The range of memory; its pages are allocated on first use."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.map = mmap.mmap(-1, REGION_BYTES, flags=flags)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.end = self.start + REGION_BYTES

    def place(self, address: int) -> int:
        """The GPU whose memory contains an address; ``PINNED`` for pinned memory, -1 for other."""
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
    """Bytes of a slot with the same uses: the last write, and the reads since."""

    start: int
    end: int
    write: User | None = None
    reads: dict[object, User] = field(default_factory=dict)


@dataclass
class Generation:
    """One owner of a part of a slot.

    Attributes:
        start: address of the part.
        nbytes: requested bytes; the bytes after them have no owner.
        born: number of the first call that may use it.
        freed_at: number of the first call that may not.
    """

    start: int
    nbytes: int
    born: int
    freed_at: float = float("inf")


class Slot:
    """The memory of one ``cudaMalloc``.

    Attributes:
        pool: the pool that allocated it.
        place: the GPU, or ``PINNED``.
        start: its address.
        capacity: bytes.
        generations: the owners of its parts, oldest first.
        cells: the uses of its bytes, in order of address.
        is_mapped: whether peers may access it; False for ``cudaMallocAsync``.
    """

    is_mapped = True

    def __init__(self, pool: object, place: int, start: int, capacity: int) -> None:
        self.pool = pool
        self.place = place
        self.start = start
        self.capacity = capacity
        self.generations: list[Generation] = []
        self.cells = [Cell(start, start + capacity)]

    def owner(self, address: int, number: int) -> Generation | None:
        """The owner of a byte when call ``number`` was made."""
        for one in reversed(self.generations):
            if one.born <= number < one.freed_at and one.start <= address < one.start + one.nbytes:
                return one
        return None

    def cut(self, start: int, end: int) -> list[Cell]:
        """The cells that cover exactly these bytes; cells are split if needed."""
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

    def write(self, start: int, end: int, user: User) -> None:
        """Makes one cell of these bytes, which were all written at once."""
        cells = self.cut(start, end)
        first = self.cells.index(cells[0])
        self.cells[first : first + len(cells)] = [Cell(start, end, user)]


@dataclass(eq=False)
class Chunk:
    """A part of a slot that is allocated or free as a whole, like a chunk of CuPy's pool."""

    slot: Slot
    start: int
    size: int
    before: Chunk | None = None
    behind: Chunk | None = None
    owner: Generation | None = None

    def split(self, size: int) -> Chunk | None:
        """Splits off the bytes after the first ``size``."""
        if self.size == size:
            return None
        rest = Chunk(self.slot, self.start + size, self.size - size, self, self.behind)
        if self.behind is not None:
            self.behind.before = rest
        self.size, self.behind = size, rest
        return rest

    def merge(self) -> None:
        """Merges with the next chunk."""
        behind = self.behind
        self.size += behind.size
        self.behind = behind.behind
        if self.behind is not None:
            self.behind.before = self


def rounded(nbytes: int, place: int = 0) -> int:
    """Rounds like CuPy's pools, but always up: at least one unused byte follows each owner.

    Pinned memory is rounded to powers of two, but for the granule.
    """
    if place == PINNED:
        return max(GRANULE, 1 << (nbytes - 1).bit_length()) + GRANULE
    return (nbytes // GRANULE + 1) * GRANULE


class Heap:
    """The memory of one machine, and the chunks of its pools, by queue.

    Args:
        capacity: bytes of each GPU.
        pinned: bytes of host memory that can be pinned.
    """

    def __init__(self, capacity: int, pinned: int = GPU_BYTES) -> None:
        self.capacity = capacity
        self.pinned = pinned
        self._slots: dict[int, list[Slot]] = {place: [] for place in range(NUM_GPUS + 1)}
        self._free: dict[tuple[object, int, object], list[Chunk]] = {}

    def take(self, pool: object, place: int, nbytes: int, order: object) -> Chunk | None:
        """Takes the smallest free chunk that is large enough, and splits it unless it is pinned."""
        size = rounded(nbytes, place)
        free = self._free.get((pool, place, order), [])
        fitting = [one for one in free if one.size == size or (one.size > size and place != PINNED)]
        if not fitting:
            return None
        chunk = min(fitting, key=lambda one: one.size)
        free.remove(chunk)
        rest = chunk.split(size)
        if rest is not None:
            free.append(rest)
        return chunk

    def grow(self, pool: object, place: int, nbytes: int) -> Chunk:
        """``cudaMalloc`` at the first gap that is large enough.

        Raises:
            MemoryError: the GPU has no more.
        """
        size = rounded(nbytes, place)
        if self.used(place) + size > (self.capacity if place != PINNED else self.pinned):
            raise MemoryError
        slots = self._slots[place]
        start = REGION.start + place * GPU_BYTES + GAP
        for slot in slots:
            if start + size + GAP <= slot.start:
                break
            start = slot.start + slot.capacity + GAP
        if start + size > REGION.start + (place + 1) * GPU_BYTES:
            raise MemoryError
        made = Slot(pool, place, start, size)
        insort(slots, made, key=lambda slot: slot.start)
        return Chunk(made, start, size)

    def give(self, chunk: Chunk, order: object) -> None:
        """Returns a chunk to its pool, merged with free neighbors."""
        free = self._free.setdefault((chunk.slot.pool, chunk.slot.place, order), [])
        if chunk.behind in free:
            free.remove(chunk.behind)
            chunk.merge()
        if chunk.before in free:
            chunk = chunk.before
            chunk.merge()
        else:
            free.append(chunk)

    def whole(self, pool: object, place: int) -> list[Chunk]:
        """The free chunks of a pool that are whole slots, which it can return to CUDA."""
        return [
            chunk
            for (owner, where, _), free in self._free.items()
            for chunk in free
            if (owner, where) == (pool, place) and chunk.before is None and chunk.behind is None
        ]

    def release(self, chunks: list[Chunk]) -> None:
        """``cudaFree`` of whole chunks."""
        for chunk in chunks:
            self._slots[chunk.slot.place].remove(chunk.slot)
        for free in self._free.values():
            free[:] = [chunk for chunk in free if chunk not in chunks]

    def used(self, place: int, pool: object = None) -> int:
        """Bytes allocated on a GPU, by one pool or by all."""
        slots = self._slots[place]
        return sum(slot.capacity for slot in slots if pool is None or slot.pool == pool)

    def find(self, address: int) -> Slot | None:
        """The slot that contains an address, or the one before it."""
        place = REGION.place(address)
        if place < 0:
            return None
        slots = self._slots[place]
        position = bisect_right(slots, address, key=lambda slot: slot.start)
        return slots[position - 1] if position else None
