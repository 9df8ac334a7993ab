"""Launches one kernel three times at a size that fills a GPU, for a profiler.

python -m gpu_check.launches add_n|pack|all_sum|local_sgd [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from measure.report import keep
from measure.resnet50 import resnet50

import gradreduce as gr
from gradreduce import ops
from gradreduce.device import Mesh

from .run_ncu import WARM_UPS

SIZE, QUICK_SIZE = 2**24, 2**8  # float32 elements: 64 MiB
NUM_TERMS, SPLIT = 8, 4
NUM_LAUNCHES = WARM_UPS + 1
Launch = Callable[[], object]


def add_n(mesh: Mesh, size: int) -> Launch:
    """Adds eight terms."""
    out, *terms = (mesh.devices[0].zeros((size,), "float32") for _ in range(1 + NUM_TERMS))
    return lambda: ops.add_n([out], [terms])


def pack(mesh: Mesh, size: int) -> Launch:
    """Packs the gradients of ResNet-50 into a flat buffer."""
    shapes = [(min(size, math.prod(shape)),) for shape in resnet50()]
    tensors = [mesh.devices[0].zeros(shape, "float32") for shape in shapes]
    (parts,) = mesh.flat_buffer(shapes, "float32").views
    return lambda: ops.pack(parts, tensors)


def all_sum(mesh: Mesh, size: int) -> Launch:
    """Adds eight inputs into eight outputs, in two groups."""
    outs, inputs = (
        [mesh.devices[0].zeros((size,), "float32") for _ in range(NUM_TERMS)] for _ in range(2)
    )
    return lambda: ops.all_sum([outs], [inputs], SPLIT)


def local_sgd(mesh: Mesh, size: int) -> Launch:
    """Runs AGN's local step of one variable."""
    row = [mesh.devices[0].zeros((size,), "float32") for _ in range(3)]
    kernel = ops.RULE_KERNELS[ops.RULES["sgd"], "local"]
    return lambda: ops.update_rows(kernel, [row], (0, 0.1), mesh.devices[0])


LAUNCHES = {each.__name__: each for each in (add_n, pack, all_sum, local_sgd)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Launches the kernel and reports the number of launches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernel", choices=LAUNCHES)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="a tiny size: only shows that it runs")
    options = parser.parse_args(arguments)
    with gr.open_mesh(1, backend="cuda") as mesh:
        launch = LAUNCHES[options.kernel](mesh, QUICK_SIZE if options.quick else SIZE)
        with mesh.journal() as journal:
            for _ in range(NUM_LAUNCHES):
                launch()
        mesh.synchronize()
    keep({"launches": journal.launches}, options.json)


if __name__ == "__main__":
    main()
