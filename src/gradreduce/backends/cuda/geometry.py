"""Launch geometry: how much work each block and thread of a GPU gets.

One block for each chunk, so that the hardware scheduler balances the work: a block with a short row
ends early and frees its multiprocessor for the next block. Not taken from another library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VECTOR = 16  # bytes that a thread loads and stores at once
# A block has an eighth of a multiprocessor's threads: when it ends, only an eighth is idle.
BLOCKS_PER_PROCESSOR = 8
MOST_THREADS = 256  # __launch_bounds__ in kernels/
# Vectors per thread and chunk in a large launch: enough to hide the cost of finding the row, few
# enough that the last blocks of a launch end at about the same time.
VECTORS = 4
# The most chunks for each block that fits on the GPU at once; limits the table's map.
WAVES = 64


@dataclass(frozen=True)
class Geometry:
    """Grid, block and chunk sizes for one GPU.

    Attributes:
        warp: the threads of a warp.
        threads: the threads of a full block.
        num_processors: the number of multiprocessors.
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

    def chunk_size(
        self, num_items: int, itemsize: int, blocks: int, *, long_items: bool = False
    ) -> int:
        """Returns the number of items in a chunk: whole vectors for every thread.

        Args:
            num_items: the number of items in all rows.
            itemsize: the bytes of an item in the narrowest operand.
            blocks: how many full blocks of the kernel fit on a multiprocessor at once.
            long_items: whether an item is more than an element, such as 64 terms of a sum. Then a
                little work is spread over blocks of few warps.
        """
        resident = blocks * self.num_processors
        chunk = VECTORS * self.threads * (VECTOR // itemsize)
        unit = (self.warp if long_items else self.threads) * (VECTOR // itemsize)
        # Spread small work over all blocks.
        while chunk % (2 * unit) == 0 and num_items // chunk < resident:
            chunk //= 2
        while num_items // chunk > WAVES * resident:
            chunk *= 2
        return chunk

    def block(self, num_items: int, num_chunks: int, itemsize: int) -> int:
        """Returns the threads of a block: the average vectors per chunk, in whole warps.

        In a launch of many tiny rows most threads of a full block would be idle, and the
        multiprocessor would have too few loads in flight.
        """
        vectors = -(-num_items * itemsize // (num_chunks * VECTOR))
        warps = -(-vectors // self.warp)
        return min(self.threads, warps * self.warp)
