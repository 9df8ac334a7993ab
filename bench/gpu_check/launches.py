"""Launches kernels at a size that fills a GPU, each three times, for a profiler."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from measure.random_values import fill
from measure.resnet50 import resnet50

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Buffer, Mesh

SIZE, QUICK_SIZE = 2**24, 2**8  # float32 elements: 64 MiB
NUM_TERMS, SPLIT = 8, 4
NUM_LAUNCHES = 3  # of each kernel
WIDTH = 64  # of a row of an embedding
LANES = 32  # partial sums of a block of squares
Launch = Callable[[], object]


def operands(mesh: Mesh, count: int, size: int, dtype: str = "float32") -> list[Buffer]:
    """Returns arrays of random numbers."""
    return [fill(mesh.devices[0].empty((size,), dtype)) for _ in range(count)]


def add_n(mesh: Mesh, size: int) -> Launch:
    """Adds eight terms."""
    out, *terms = operands(mesh, 1 + NUM_TERMS, size)
    return lambda: ops.add_n([out], [terms])


def accumulate_n(mesh: Mesh, size: int) -> Launch:
    """Adds one term to a sum."""
    total, term = operands(mesh, 2, size)
    return lambda: ops.accumulate_n([total], [[term]])


def pack(mesh: Mesh, size: int) -> Launch:
    """Packs the gradients of ResNet-50 into a flat buffer."""
    shapes = [(min(size, math.prod(shape)),) for shape in resnet50()]
    tensors = [operands(mesh, 1, *shape)[0] for shape in shapes]
    (parts,) = mesh.flat_buffer(shapes, "float32").views
    return lambda: ops.pack(parts, tensors)


def all_sum(mesh: Mesh, size: int) -> Launch:
    """Adds eight inputs into eight outputs, in two groups."""
    outs, inputs = (operands(mesh, NUM_TERMS, size) for _ in range(2))
    return lambda: ops.all_sum([outs], [inputs], SPLIT)


def square_sum(mesh: Mesh, size: int) -> Launch:
    """Adds the squares of an array in blocks: the first pass of a norm."""
    (array,) = operands(mesh, 1, size)
    out = mesh.devices[0].empty((LANES * -(-size // ops.BLOCK),), "float64")
    terms = ops.BLOCK // LANES
    return lambda: ops.square_sum([out], [array], lanes=LANES, terms=terms)


def segment_sum(mesh: Mesh, size: int) -> Launch:
    """Adds rows of the same index, on average ten for each."""
    rows = size // WIDTH
    segments = ops.plan_segments(np.random.default_rng(1).integers(0, max(1, rows // 10), rows))
    (values,) = operands(mesh, 1, size)
    out = mesh.devices[0].empty((segments.num_segments, WIDTH), "float32")
    return ops.segment_sum_command([out], [values.view(0, (rows, WIDTH))], [segments])


def take_rows(mesh: Mesh, size: int) -> Launch:
    """Takes half of the rows of an array, in a random order."""
    rows = size // WIDTH
    numbers = np.random.default_rng(1).permutation(rows)[: rows // 2]
    (values,) = operands(mesh, 1, size)
    out = mesh.devices[0].empty((len(numbers), WIDTH), "float32")
    return ops.take_rows_command([out], [values.view(0, (rows, WIDTH))], [numbers])


def local_sgd(mesh: Mesh, size: int) -> Launch:
    """Runs AGN's local step of one variable."""
    row = operands(mesh, 3, size)
    kernel = ops.RULE_KERNELS[ops.RULES["sgd"], "local"]
    return lambda: ops.update_rows(kernel, [row], (0, 0.1), mesh.devices[0])


# Make the launch of the kernel of their name.
LAUNCHES = (
    add_n, accumulate_n, pack, all_sum, square_sum, segment_sum, take_rows, local_sgd,
)  # fmt: skip


def functions() -> dict[str, str]:
    """Returns the name of each kernel's function in its ``.cu`` file, which a profiler shows."""
    kernels = {kernel.name: kernel for kernel in ops.KERNELS}
    mine = [kernels[make.__name__] for make in LAUNCHES]
    expressions = {kernel.name: kernel.expression(kernel.templates[0]) for kernel in mine}
    return {name: text.partition("<")[0] for name, text in expressions.items()}


def launched(quick: bool) -> dict[str, int]:
    """Launches the kernels in turns, and counts the launches."""
    size = QUICK_SIZE if quick else SIZE
    with gr.open_mesh(1, backend="cuda") as mesh:
        launches = [prepare(mesh, size) for prepare in LAUNCHES]
        with mesh.journal() as journal:
            for launch in launches:
                for _ in range(NUM_LAUNCHES):
                    launch()
        mesh.synchronize()
    return {"launches": journal.launches}
