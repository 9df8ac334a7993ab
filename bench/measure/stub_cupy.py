"""A CuPy whose calls do nothing, so that only our own Python takes time.

``install()`` makes ``import cupy`` import it. It has the names that the CUDA backend uses and
checks nothing; ``tests/fake_cupy`` is the fake that checks. Memory is a range of addresses, kernels
are not compiled, and events have always passed.
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict, deque
from importlib.machinery import ModuleSpec
from itertools import count, repeat
from typing import Any, Self

import numpy as np

_addresses = count(1 << 40, 1 << 30)  # each block has a gigabyte
_handles = count(1 << 20)


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stands for every driver call without a result."""


def _zero(*arguments: Any) -> int:
    """Stands for every driver call that returns a status or a number."""
    return 0


class CUDARuntimeError(RuntimeError):
    """An error that is never raised."""

    status = 0


class Entered:
    """What a ``with`` statement makes current."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Device(Entered):
    """A GPU."""

    compute_capability = "90"
    attributes = types.MappingProxyType({
        "MultiProcessorCount": 132,
        "MaxThreadsPerBlock": 1024,
        "MaxThreadsPerMultiProcessor": 2048,
        "WarpSize": 32,
    })  # fmt: skip

    def __init__(self, device: int = 0) -> None:
        self.id = device


class Stream(Entered):
    """A stream; also the graph of one that captured."""

    def __init__(self, *, non_blocking: bool = False) -> None:
        self.ptr = next(_handles)

    def end_capture(self) -> Self:
        """Returns the graph."""
        return self

    begin_capture = launch = synchronize = upload = wait_event = _nothing


class Event:
    """An event, which has passed."""

    __slots__ = ("ptr",)
    done = True

    def __init__(self, *, disable_timing: bool = False) -> None:
        self.ptr = 0

    record = _nothing


class MemoryPointer:
    """An address."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.ptr: int = memory.ptr + offset


class UnownedMemory:
    """Memory that another library owns."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr = ptr
        self.owner = owner


class PooledMemory:
    """Memory that returns to its pool when it is dropped."""

    __slots__ = ("_free", "ptr")

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.ptr = free.pop() if free else next(_addresses)

    def __del__(self) -> None:
        self._free.append(self.ptr)


class MemoryPool:
    """Allocates ranges of addresses, and reuses freed ones."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def malloc(self, size: int) -> PooledMemory:
        """Returns a range of addresses."""
        return PooledMemory(self._free[size])

    free_all_blocks = _nothing
    total_bytes = _zero


class PinnedMemory(bytearray):
    """Pinned memory."""

    ptr = 0


class Array:
    """A contiguous ``cupy.ndarray``."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: Any = None) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.data = MemoryPool().malloc(self.nbytes) if memptr is None else memptr
        self.device = Device(0)
        self.flags = types.SimpleNamespace(c_contiguous=True)

    get = _nothing  # by which our code recognizes its arrays


class Kernel:
    """A kernel; also the module that it comes from."""

    __call__ = launch = load = _nothing
    ptr = 0

    def __init__(self, **options: Any) -> None:
        self.kernel = self

    def get_function(self, name: str) -> Self:
        """Returns the kernel."""
        return self


class CNumpyArray:
    """An argument of a launch."""

    def __init__(self, v: Any) -> None:
        self.val = v


def compile_using_nvrtc(
    source: str, options: Any, *, name_expressions: Any, **others: Any
) -> tuple[bytes, dict[str, str]]:
    """Returns no code, and the names of the functions."""
    return b"", {name: name for name in name_expressions}


def install() -> None:
    """Makes ``import cupy`` import this stub."""
    current = Stream()
    Array.__module__ = "cupy"  # by which our code recognizes its arrays too
    runtime: dict[str, Any] = {
        "CUDARuntimeError": CUDARuntimeError,
        "getDeviceCount": lambda: 1,
        "is_hip": False,
        # As quick as CuPy's, which are in C: they are called for each launch.
        "getDevice": repeat(0).__next__,
        "setDevice": deque[int](maxlen=0).append,
        **dict.fromkeys(("eventQuery", "streamIsCapturing", "streamQuery"), _zero),
        **dict.fromkeys(("eventRecord", "memcpyAsync", "memsetAsync", "streamWaitEvent"), _nothing),
        **dict.fromkeys(("memcpyDefault", "memcpyDeviceToDevice", "memcpyDeviceToHost"), 0),
        **dict.fromkeys(("memcpyHostToDevice", "streamCaptureModeThreadLocal"), 0),
    }
    modules: dict[str, dict[str, Any]] = {
        # RawModule: for older checkouts
        "cupy": {"RawModule": Kernel, "__version__": "14.2.0", "ndarray": Array},
        "cupy.cuda": {
            "get_current_stream": lambda device_id=-1: current,
            "alloc_pinned_memory": PinnedMemory,
            **{each.__name__: each for each in (Device, Event, MemoryPointer, MemoryPool, Stream)},
            "UnownedMemory": UnownedMemory,
        },
        "cupy.cuda.compiler": {
            "CompileException": RuntimeError, "compile_using_nvrtc": compile_using_nvrtc,
        },
        "cupy.cuda.driver": {"occupancyMaxActiveBlocksPerMultiprocessor": lambda *arguments: 8},
        "cupy.cuda.function": {"CNumpyArray": CNumpyArray, "Module": Kernel},
        # No real version, because the cache on disk keeps what this one compiles.
        "cupy.cuda.nvrtc": {"getVersion": lambda: (0, 1)},
        "cupy.cuda.nvtx": {"RangePop": _nothing, "RangePush": _nothing},
        "cupy.cuda.runtime": runtime,
    }  # fmt: skip
    for name, content in modules.items():
        made = sys.modules[name] = types.ModuleType(name)
        made.__spec__, made.__path__ = ModuleSpec(name, None), []
        vars(made).update(content)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, made)
