"""Launch geometry: how much work each block and thread of a GPU gets.

Source: own. One block for each chunk, so that the hardware's own scheduler shares them out: a
block that meets a short row ends early and frees its SM for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VECTOR = 16  # bytes, what a thread loads and stores at once
# A block has an eighth of a multiprocessor's threads: when it ends, an eighth waits for the next.
BLOCKS_PER_PROCESSOR = 8
MOST_THREADS = 256  # __launch_bounds__ in kernels/
# Vectors of a thread, in chunks that are many: enough to pay for finding the row, few enough for
# the last blocks of a launch to end together.
VECTORS = 4
# Chunks for each block that fits on the GPU at once, at most: it bounds the table's map.
WAVES = 64


@dataclass(frozen=True)
class Geometry:
    """Grid, block and chunk sizes for one GPU.

    Attributes:
        warp: threads that run in step.
        threads: of a full block.
        num_processors: multiprocessors.
    """

    warp: int
    threads: int
    num_processors: int

    @classmethod
    def of(cls, attributes: Mapping[str, int]) -> Geometry:
        """Makes the geometry from ``cupy.cuda.Device.attributes``."""
        warp = attributes["WarpSize"]
        share = attributes["MaxThreadsPerMultiProcessor"] // BLOCKS_PER_PROCESSOR
        threads = min(share, MOST_THREADS, attributes["MaxThreadsPerBlock"]) // warp * warp
        return cls(warp, threads, attributes["MultiProcessorCount"])

    def chunk_size(self, num_items: int, itemsize: int, blocks: int) -> int:
        """Returns the items of a chunk: whole vectors for every thread of a block.

        Args:
            num_items: in all rows together.
            itemsize: bytes of an item in the narrowest operand.
            blocks: of the kernel, full ones that fit on a multiprocessor at once.
        """
        resident = blocks * self.num_processors
        unit = self.threads * (VECTOR // itemsize)
        chunk = VECTORS * unit
        while chunk > unit and num_items // chunk < resident:  # small work feeds all blocks
            chunk //= 2
        while num_items // chunk > WAVES * resident:
            chunk *= 2
        return chunk

    def block(self, num_items: int, num_chunks: int, itemsize: int) -> int:
        """Returns the threads of a block: vectors per chunk on average, in whole warps.

        A launch of many tiny rows would leave most threads of a full block without work, and so
        the multiprocessor without loads in flight.
        """
        vectors = -(-num_items * itemsize // (num_chunks * VECTOR))
        warps = -(-vectors // self.warp)
        return min(self.threads, warps * self.warp)
