"""Where a benchmark of one device runs: a GPU where CuPy sees one, else both faces of one."""

from __future__ import annotations

import importlib.util

import gradreduce as gr
from gradreduce.device import Mesh

__all__ = ["FACES", "one_device"]

FACES = ("numpy", "compiled")


def one_device() -> dict[str, Mesh]:
    """The GPU, or both faces of a simulated device; to be closed."""
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        if cupy.cuda.is_available():
            return {"cuda": gr.open_mesh(1, backend="cuda")}
    return {face: gr.open_mesh(1, backend="sim", kernels=face, strict=False) for face in FACES}
