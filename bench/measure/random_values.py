"""Random operands: memory and adders may take less time, and power, for zeros."""

from __future__ import annotations

import numpy as np

from gradreduce.device import Buffer, as_dtype

PATTERN_SIZE = 2**16  # elements that are drawn; they are repeated
VALUES, GRADIENTS = 0, 1  # seeds


def normals(size: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Returns normally distributed values."""
    random = np.random.default_rng(seed)
    pattern = random.standard_normal(min(size, PATTERN_SIZE)).astype(as_dtype(dtype))
    return np.resize(pattern, size)


def integers(size: int) -> np.ndarray:
    """Returns float32 integers from -64 to 63, of which sums are exact."""
    pattern = np.random.default_rng(0).integers(-64, 64, min(size, PATTERN_SIZE))
    return np.resize(pattern.astype(np.float32), size)


def fill(buffer: Buffer, seed: int = 0) -> Buffer:
    """Fills a Buffer of floats as ``normals`` does, and returns it; copies on the device."""
    size, dtype = buffer.size, buffer.dtype
    done = min(size, PATTERN_SIZE)
    buffer.device.upload(normals(done, dtype.name, seed), out=buffer.view(0, (done,)))
    while done < size:
        more = min(done, size - done)
        buffer.device.copy(buffer.view(done, (more,)), buffer.view(0, (more,)))
        done += more
    return buffer
