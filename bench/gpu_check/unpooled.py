"""Pytest plugin that allocates each block of GPU memory by its own ``cudaMalloc``.

``-p gpu_check.unpooled``, with a real CuPy. compute-sanitizer knows where allocations end, but not
where the blocks end that CuPy's pool cuts out of one allocation.
"""

from __future__ import annotations

from typing import Any

import cupy


class Unpooled:
    """Replacement for ``cupy.cuda.MemoryPool`` without pooling.

    Memory is freed by ``cudaFree``, which waits for work that uses it.
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
