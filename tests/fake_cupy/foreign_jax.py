"""A fake of JAX on GPUs: arrays that never change, on JAX's own stream.

It asks DLPack for what JAX 0.11 asks for, and keeps what an operation reads until that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import cupy
import numpy as np


class _Gpu:
    """JAX's two streams on a GPU: one computes, one waits for input arrays."""

    def __init__(self, gpu: int) -> None:
        self.id = gpu
        self.platform = "gpu"
        with cupy.cuda.Device(gpu):
            self.compute = cupy.cuda.Stream(non_blocking=True)
            self.ready = cupy.cuda.Stream(non_blocking=True)
        self._read: list[tuple[object, object]] = []  # the end of an operation, and its inputs

    def run(self, operation: Callable[..., object], *inputs) -> Array:
        with cupy.cuda.Device(self.id), self.compute:
            made = Array(operation(*inputs), self)
            self._read = [each for each in self._read if not each[0].done]
            self._read.append((self.compute.record(), inputs))
        return made

    def forget(self) -> None:
        """Drops what operations have read."""
        self._read.clear()


class Array:
    """The attributes of a ``jax.Array`` on a GPU that conversion reads, and some arithmetic."""

    def __init__(self, array, home: _Gpu) -> None:
        self._array = array
        self._home = home
        self.shape, self.dtype = array.shape, array.dtype

    def devices(self) -> set[_Gpu]:
        return {self._home}

    def unsafe_buffer_pointer(self) -> int:
        return self._array.data.ptr

    def __add__(self, other: Array) -> Array:
        return self._home.run(np.add, self._array, other._array)

    def __matmul__(self, other: Array) -> Array:
        return self._home.run(np.matmul, self._array, other._array)

    def __array__(self, dtype=None, copy=None):
        with cupy.cuda.Device(self._home.id), self._home.compute:
            return self._array.get()

    def __dlpack_device__(self):
        return 2, self._home.id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        with cupy.cuda.Device(self._home.id):
            event = self._home.compute.record()
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)
        return self._array


Array.__module__ = "jaxlib"


def stand_in(num_gpus: int) -> ModuleType:
    """A JAX that sees these GPUs."""
    gpus = [_Gpu(gpu) for gpu in range(num_gpus)]

    def device_put(values: np.ndarray, device: _Gpu) -> Array:
        return device.run(lambda: cupy.asarray(values))

    def from_dlpack(external) -> Array:
        gpu = gpus[external.__dlpack_device__()[1]]
        shared = external.__dlpack__(stream=gpu.ready.ptr)  # for any current GPU
        with cupy.cuda.Device(gpu.id):
            gpu.compute.wait_event(gpu.ready.record())
        return Array(shared, gpu)

    module = ModuleType("jax")
    module.__dict__.update(
        Array=Array,
        device_put=device_put,
        devices=lambda platform: gpus,
        dlpack=SimpleNamespace(from_dlpack=from_dlpack),
    )
    return module
