"""The device of a benchmark: a GPU if CuPy finds one, otherwise a simulated device."""

from __future__ import annotations

import importlib.util

import gradreduce as gr
from gradreduce.backends import Kernels
from gradreduce.device import Mesh

__all__ = ["IMPLEMENTATIONS", "gpu_name", "has_gpu", "one_device"]

IMPLEMENTATIONS: tuple[Kernels, ...] = ("numpy", "compiled")


def has_gpu() -> bool:
    """Returns whether CuPy is installed and finds a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def gpu_name() -> str:
    """Returns the name of the first GPU."""
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


def one_device() -> dict[str, Mesh]:
    """Opens the GPU, or a simulated device with both implementations; close them."""
    if has_gpu():
        return {"cuda": gr.open_mesh(1, backend="cuda")}
    return {
        implementation: gr.open_mesh(1, backend="sim", kernels=implementation, strict=False)
        for implementation in IMPLEMENTATIONS
    }
