"""A fake of PyTorch on GPUs: the attributes that conversion reads, and streams.

A test module takes the fixture by assignment: ``torch = foreign.torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import cupy
import numpy as np
import pytest

from gradreduce.device import as_dtype

from .machine import current
from .surface import queue_of


class Tensor:
    """The attributes of a ``torch.Tensor`` on a GPU that conversion reads."""

    requires_grad = False
    is_cuda = is_leaf = True
    version = 0
    layout = "strided"
    grad: Tensor | None = None

    def __init__(self, array, dtype: str | None = None) -> None:
        self.array = array
        self.dtype = dtype or str(array.dtype)
        self.shape, self.nbytes = array.shape, array.nbytes
        self.device = SimpleNamespace(type="cuda", index=array.device.id)

    def numpy(self):
        raise TypeError("can't convert cuda tensor to numpy")

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def detach(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        with sys.modules["torch"].on(self.device.index):
            self.array[...] = other.array

    def add_(self, other: float) -> None:
        with sys.modules["torch"].on(self.device.index):
            self.array += other

    def zero_(self) -> None:
        with sys.modules["torch"].on(self.device.index):
            self.array[...] = 0

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.dtype.itemsize for step in self.array.strides)

    def permute(self, order) -> Tensor:
        return Tensor(self.array.transpose(order), self.dtype)

    def __setitem__(self, place, other: Tensor) -> None:
        with sys.modules["torch"].on(self.device.index):
            self.array[place] = other.array

    def data_ptr(self) -> int:
        return self.array.data.ptr

    def is_inference(self) -> bool:
        return False

    def view(self, dtype: str) -> Tensor:
        as_numpy = {"bfloat16": as_dtype("bfloat16")}.get(dtype, dtype)
        return Tensor(self.array.view(as_numpy), dtype)

    def __dlpack_device__(self):
        return 2, self.array.device.id

    def __dlpack__(self, *, stream, max_version=None, copy=None):
        """Makes the consumer's stream wait for the producer's; these calls are not counted."""
        assert self.dtype != "bfloat16", "DLPack of 16-bit views only"
        assert stream, "0 is no stream of DLPack's"
        if stream == cupy.cuda.Stream.ptds.ptr:
            raise BufferError("per-thread default stream is not supported.")
        with current().entered() as machine:
            ours = queue_of(machine, sys.modules["torch"].stream_of(self.array.device))
            last = ours.last if ours.capture is None else machine.submit(ours, "event")
            if last is not None:
                machine.wait(queue_of(machine, stream), last)
        return self.array


Tensor.__module__ = "torch"


def _increment_version(tensor: Tensor) -> None:
    tensor.version += 1


def stand_in() -> ModuleType:
    """A PyTorch with its own current stream on each GPU; ``stream`` is that of GPU 0."""
    streams: dict[int, cupy.cuda.Stream] = {}

    def stream_of(device) -> cupy.cuda.Stream:
        gpu = device if isinstance(device, int) else getattr(device, "index", None)
        gpu = device.id if gpu is None else gpu
        if gpu not in streams:
            with cupy.cuda.Device(gpu):
                streams[gpu] = cupy.cuda.Stream(non_blocking=True)
        return streams[gpu]

    def current_stream(device):
        return SimpleNamespace(cuda_stream=stream_of(device).ptr)

    @contextmanager
    def on(gpu: int) -> Iterator[None]:
        with cupy.cuda.Device(gpu), stream_of(gpu):
            yield

    class CUDAGraph:
        graph = None

        def replay(self) -> None:
            self.graph.launch(stream_of(0))

    @contextmanager
    def graph(made: CUDAGraph, capture_error_mode: str = "global") -> Iterator[None]:
        """Captures on GPU 0, with another current stream inside."""
        before, mode = stream_of(0), ["global", "thread_local", "relaxed"].index(capture_error_mode)
        with cupy.cuda.Device(0):
            side = streams[0] = cupy.cuda.Stream(non_blocking=True)
            side.begin_capture(mode)
            try:
                yield
            finally:
                streams[0] = before
                made.graph = side.end_capture()

    module = ModuleType("torch")
    module.__dict__.update(
        strided="strided", bfloat16="bfloat16", int16="int16", Tensor=Tensor, from_dlpack=Tensor,
        stream=stream_of(0), stream_of=stream_of, on=on, streams=streams,
        cuda=SimpleNamespace(
            current_stream=current_stream, CUDAGraph=CUDAGraph, graph=graph,
            synchronize=lambda: cupy.cuda.Device().synchronize(),
        ),
        autograd=SimpleNamespace(graph=SimpleNamespace(increment_version=_increment_version)),
    )  # fmt: skip
    return module


@pytest.fixture
def torch(mesh, monkeypatch) -> ModuleType:
    """``stand_in``, imported."""
    module = stand_in()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def change_streams(torch: ModuleType) -> list[cupy.cuda.Stream]:
    """Makes other streams current, which wait for the old ones; returns the old ones."""
    old = dict(torch.streams)
    for gpu, before in old.items():
        with cupy.cuda.Device(gpu):
            torch.streams[gpu] = cupy.cuda.Stream(non_blocking=True)
            torch.streams[gpu].wait_event(before.record())
    return list(old.values())


def made_on(stream, values: np.ndarray):
    with stream:
        return cupy.asarray(values)
