"""A pytest plugin: every block of GPU memory is a ``cudaMalloc`` of its own.

``-p gpu_check.unpooled``, with a real CuPy. compute-sanitizer knows the ends of allocations; those
of the blocks that CuPy's pool cuts out of one allocation it does not know.
"""

from __future__ import annotations

from typing import Any

import cupy

__all__ = ["Unpooled"]


class Unpooled:
    """What our device uses of ``cupy.cuda.MemoryPool``, without a pool.

    Freeing is ``cudaFree``, which waits for the GPU, so that no work loses its memory.
    """

    def malloc(self, size: int) -> Any:
        """Fresh memory of exactly this size, on the current GPU."""
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)

    def free_all_blocks(self) -> None:
        """There are none."""

    def total_bytes(self) -> int:
        """That it holds for later."""
        return 0


cupy.cuda.MemoryPool = Unpooled
