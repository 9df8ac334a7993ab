"""A CuPy whose calls do nothing, so that only our own Python takes time.

``install()`` makes ``import cupy`` import it. It has the names that the CUDA backend uses and
checks nothing; ``tests/fake_cupy`` is the fake that checks. Memory is a range of addresses, kernels
are not compiled, and events have always passed.
"""

import math
import sys
import types
from collections import defaultdict, deque
from importlib.machinery import ModuleSpec
from itertools import count, repeat
from typing import Any, Self

import numpy as np

_addresses = count(1 << 40, 1 << 30)  # each block has a gigabyte
_handles = count(1 << 20)


def _nothing(*arguments: Any, **options: Any) -> int:
    """Stands for every call of the driver, and for its constants; 0 is success."""
    return 0


class Entered:
    """What a ``with`` statement makes current."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Device(Entered):
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
        return self

    begin_capture = launch = synchronize = upload = wait_event = _nothing


class Event:
    ptr, done, record = 0, True, _nothing

    def __init__(self, *, disable_timing: bool = False) -> None:
        pass


class UnownedMemory:
    """Memory of another owner; also a pointer to it."""

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
    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def malloc(self, size: int) -> PooledMemory:
        return PooledMemory(self._free[size])

    free_all_blocks = total_bytes = _nothing


class PinnedMemory(bytearray):
    ptr = 0


class Array:
    """A contiguous ``cupy.ndarray``."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: Any = None) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.size = math.prod(shape)
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
        return self


class CNumpyArray:
    """An argument of a launch."""

    def __init__(self, v: Any) -> None:
        self.val = v


class Module(types.ModuleType):
    """A module in which every other name is a function that does nothing."""

    def __init__(self, name: str, **content: Any) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []
        vars(self).update(content)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _nothing)  # the next time it is found as quickly as CuPy's
        return _nothing


def install() -> None:
    """Makes ``import cupy`` import this stub."""
    current = Stream()
    Array.__module__ = "cupy"  # by which our code recognizes its arrays too
    errors = {"CUDARuntimeError": type("CUDARuntimeError", (RuntimeError,), {"status": 0})}
    classes = {each.__name__: each for each in (Device, Event, MemoryPool, Stream, UnownedMemory)}
    modules = [
        # RawModule: for older checkouts
        Module("cupy", RawModule=Kernel, __version__="14.2.0", ndarray=Array),
        Module(
            "cupy.cuda", get_current_stream=lambda device_id=-1: current, **classes,
            alloc_pinned_memory=PinnedMemory, MemoryPointer=lambda memory, offset: memory,
        ),
        Module(
            "cupy.cuda.compiler", CompileException=RuntimeError,
            compile_using_nvrtc=lambda source, options, *, name_expressions, **others: (
                b"", {name: name for name in name_expressions}
            ),
        ),
        Module("cupy.cuda.driver", occupancyMaxActiveBlocksPerMultiprocessor=lambda *arguments: 8),
        Module("cupy.cuda.function", CNumpyArray=CNumpyArray, Module=Kernel),
        # No real version, because the cache on disk keeps what this one compiles.
        Module("cupy.cuda.nvrtc", getVersion=lambda: (0, 1)),
        Module("cupy.cuda.nvtx"),
        # As quick as CuPy's, which are in C: they are called for each launch.
        Module(
            "cupy.cuda.runtime", getDeviceCount=lambda: 1, is_hip=False,
            getDevice=repeat(0).__next__, setDevice=deque[int](maxlen=0).append, **errors,
        ),
    ]  # fmt: skip
    for module in modules:
        sys.modules[module.__name__] = module
        package, _, last = module.__name__.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
