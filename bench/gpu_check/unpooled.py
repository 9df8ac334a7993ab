"""Pytest plugin that allocates each block of GPU memory by its own ``cudaMalloc``.

``-p gpu_check.unpooled``, with a real CuPy. compute-sanitizer knows the ends of allocations; those
of the blocks that CuPy's pool cuts out of one allocation it does not know.
"""

from __future__ import annotations

from typing import Any

import cupy

__all__ = ["Unpooled"]


class Unpooled:
    """Replacement for ``cupy.cuda.MemoryPool`` without pooling.

    Freeing is ``cudaFree``, which waits for the GPU, so that no work loses its memory.
    """

    def malloc(self, size: int) -> Any:
        """Allocates memory of exactly this size on the current GPU."""
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)

    def free_all_blocks(self) -> None:
        """Does nothing: there are no cached blocks."""

    def total_bytes(self) -> int:
        """The bytes of cached blocks: none."""
        return 0


cupy.cuda.MemoryPool = Unpooled
