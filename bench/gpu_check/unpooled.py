"""Pytest plugin that allocates each block of GPU memory by its own ``cudaMalloc``.

``-p gpu_check.unpooled``, with a real CuPy. compute-sanitizer knows where allocations end, but not
where the blocks end that CuPy's pool cuts out of one allocation.
"""

from typing import Any

import cupy


class Unpooled:
    """Replaces ``cupy.cuda.MemoryPool``; ``cudaFree`` waits for work that uses the memory."""

    def malloc(self, size: int) -> Any:
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)

    def free_all_blocks(self) -> None:
        """There are no cached blocks."""

    def total_bytes(self) -> int:
        return 0


cupy.cuda.MemoryPool = Unpooled
