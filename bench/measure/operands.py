"""Operands: random numbers, and the shapes of ResNet-50's gradients.

Memory and adders may take less time, and power, for zeros.
"""

import math
from collections.abc import Sequence

import numpy as np

from gradreduce.cli.models import MODELS
from gradreduce.device import Buffer, as_dtype

Shapes = Sequence[tuple[int, ...]]
PATTERN_SIZE = 2**16  # elements that are drawn; they are repeated
VALUES, GRADIENTS = 0, 1  # seeds
QUICK_SIZE, QUICK_TENSORS = 2**7, 12


def resnet50(quick: bool = False) -> list[tuple[int, ...]]:
    """Returns 161 shapes with 25,557,032 elements, in the order of the layers; or a few small."""
    shapes = list(MODELS["resnet50"]().values())
    if quick:
        return [(min(math.prod(shape), QUICK_SIZE),) for shape in shapes[:QUICK_TENSORS]]
    return shapes


def normals(size: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    pattern = random.standard_normal(min(size, PATTERN_SIZE)).astype(as_dtype(dtype))
    return np.resize(pattern, size)


def integers(size: int, replica: int = 0) -> np.ndarray:
    """Returns float32 integers, of which sums and means are exact; each replica's are 1 larger."""
    pattern = np.random.default_rng(0).integers(-(2**15), 2**15, min(size, PATTERN_SIZE))
    return np.resize((pattern + replica).astype(np.float32), size)


def fill(buffer: Buffer, seed: int = 0, *, replica: int | None = None) -> Buffer:
    """Fills a Buffer as ``normals`` does, or ``integers``, and returns it; copies on the device."""
    size, done = buffer.size, min(buffer.size, PATTERN_SIZE)
    dtype = buffer.dtype.name
    pattern = normals(done, dtype, seed) if replica is None else integers(done, replica)
    buffer.device.upload(pattern, out=buffer.view(0, (done,)))
    while done < size:
        more = min(done, size - done)
        buffer.device.copy(buffer.view(done, (more,)), buffer.view(0, (more,)))
        done += more
    return buffer
