"""``compile_using_nvrtc``, ``Module`` and ``Function``: runs the CUDA sources on the fake GPUs.

Takes the arguments that CuPy 14.2 takes and, unlike CUDA, checks them against the kernel.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import surface
from .machine import READ, WRITE, Access, Call, Machine, current
from .recorder import Entry, Refused, entry, layout_faults

MAX_THREADS = 1024
MAX_ARGUMENT_BYTES = 4096
# The option that our code must pass: without it the compiler fuses multiply and add.
NEEDED_OPTIONS = ("-std=c++17", "-fmad=false")
_PYTHON_TYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


_handles = itertools.count(0x7000)
_functions: weakref.WeakValueDictionary[int, Function] = weakref.WeakValueDictionary()


class CompileException(Exception):
    """NVRTC refused a text."""


class DynamicLibNotFoundError(RuntimeError):
    """Of cuda.pathfinder, by which CuPy finds libnvrtc."""


@dataclass(frozen=True)
class Declared:
    """The operands that the caller declares for a launch.

    Attributes:
        written: byte ranges ``(start, end)`` that it may write.
        read: other byte ranges that it may read.
    """

    written: tuple[tuple[int, int], ...]
    read: tuple[tuple[int, int], ...]


_local = threading.local()


@contextmanager
def declared(what: Declared):
    """Launches inside are checked against ``what``."""
    _local.declared = what
    try:
        yield
    finally:
        _local.declared = None


class CNumpyArray:
    """The bytes of a NumPy array as an argument of a launch, which is read at each launch."""

    def __init__(self, v) -> None:
        self.val = v
        self._address, _ = v.__array_interface__["data"]


def compile_using_nvrtc(  # noqa: PLR0913  # CuPy's
    source,
    options=(),
    arch=None,
    filename="kern.cu",
    name_expressions=None,
    log_stream=None,
    cache_in_memory=False,
    jitify=None,
    method=None,
):
    """Returns what ``Module.load`` takes, and the mangled names.

    The code is the source itself, with the expressions by their mangled names.
    """
    getVersion()
    if (arch, log_stream, jitify, method) != (None,) * 4 or not cache_in_memory:
        raise NotImplementedError("a cubin for the current GPU, without a file")
    for option in NEEDED_OPTIONS:
        if option not in options:
            current().fail(f"options: {option} is missing in {options}")
    names = {name: "_Z" + re.sub(r"\W", "_", name) for name in name_expressions}
    for name in names:
        try:
            entry(source, name)
        except Refused as error:
            raise CompileException(str(error)) from error
    entries = {mangled: name for name, mangled in names.items()}
    return json.dumps([source, entries]).encode(), names


def getVersion():
    """``nvrtc.getVersion``: of no real NVRTC, because caches on disk may be shared with one."""
    if not current().nvrtc:
        raise DynamicLibNotFoundError(
            'Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file: libnvrtc.so.13\n'
        )
    return 0, 0


class Module:
    """Code, loaded on the GPU that is current at ``load``."""

    def load(self, cubin):
        if not isinstance(cubin, bytes):
            raise TypeError("Argument 'cubin' has incorrect type (expected bytes)")
        with current().entered() as machine, _of_the_driver():
            self._gpu = surface.getDevice()
            if self._gpu not in range(machine.num_gpus):
                machine.fail(f"no GPU {self._gpu}")
            machine.check_alive(self._gpu)
        try:
            self._text, self._entries = json.loads(cubin)
        except ValueError:
            current().fail("what is loaded was not compiled")

    def get_function(self, name):
        if name not in self._entries:
            current().fail(f"{name} is not among {self._entries}")
        expression = self._entries[name]
        return Function(entry(self._text, expression), self._text, expression, gpu=self._gpu)


class Function:
    """A kernel loaded on one GPU."""

    def __init__(self, made: Entry, text: str, name: str, *, gpu: int) -> None:
        self._entry = made
        self._text = text
        self._name = name
        self._gpu = gpu
        self._ptr = next(_handles)
        _functions[self._ptr] = self

    @property
    def ptr(self):
        return self._ptr

    def __call__(
        self, grid, block, args, shared_mem=0, stream=None, enable_cooperative_groups=False
    ):
        for shape in (grid, block):
            if not isinstance(shape, tuple):
                raise TypeError(f"Expected tuple, got {type(shape).__name__}")
        with current().entered() as machine:
            queue = surface.queue_of(machine, stream)
            self._check_place(machine, queue)
            self._check_shape(machine, grid, block)
            packed = [packed_argument(argument) for argument in args]
            self._check_arguments(machine, packed)
            contents = [content for _, content, _ in packed]
            promised = getattr(_local, "declared", None)
            tables = _tables(machine, contents)

            def work(call: Call) -> None:
                # Checked before it runs, because a kernel that reads a freed table would crash.
                machine.check(call, [(start, start + 8, READ) for start, _ in tables])
                touched, wild = self._entry.run(contents, grid[0], block[0])
                if wild:
                    machine.fail(f"out of bounds: {call.what} touches {wild:#x}, of no GPU")
                if promised is not None:
                    _check_declared(machine, call, touched, promised, tables)
                machine.check(call, touched)

            machine.count("launch")
            with _of_the_driver():
                machine.submit(queue, self._name, work)

    def check_gpu(self, machine: Machine) -> int:
        here = surface.getDevice()
        if self._gpu != here:
            machine.fail(f"wrong device: {self._name} of GPU {self._gpu}, current is {here}")
        return here

    def _check_place(self, machine: Machine, queue: Any) -> None:
        here = self.check_gpu(machine)
        if queue.gpu != here:
            machine.fail(f"wrong device: {self._name} on {queue}, current is {here}")

    def _check_shape(self, machine: Machine, grid: tuple, block: tuple) -> None:
        blocks, threads = int(np.prod(grid)), int(np.prod(block))
        if not (1 <= threads <= MAX_THREADS and 1 <= blocks < 2**31):
            machine.fail(f"invalid configuration: {self._name} with {grid} of {block}")
        if blocks != grid[0] or threads != block[0]:
            machine.fail(f"{self._name}: only one dimension is known here: {grid}, {block}")

    def _check_arguments(self, machine: Machine, packed: Sequence[tuple]) -> None:
        """CUDA does not check this: it reads as many bytes as the kernel declares."""
        wanted = self._entry.parameters
        if len(packed) != len(wanted):
            machine.fail(f"arguments: {self._name} takes {len(wanted)}, got {len(packed)}")
        if sum(len(content) for _, content, _ in packed) > MAX_ARGUMENT_BYTES:
            machine.fail(f"arguments: more than {MAX_ARGUMENT_BYTES} bytes for {self._name}")
        for position, ((kind, content, dtype), (needed, size)) in enumerate(
            zip(packed, wanted, strict=True)
        ):
            if (kind, len(content)) != (needed, size):
                machine.fail(
                    f"arguments: {self._name} wants {needed}{size} at {position}, "
                    f"got {kind}{len(content)}"
                )
            if kind == "s":
                wrong = layout_faults(self._text, self._name, position, dtype)
                if wrong:
                    machine.fail(f"arguments: {self._name}: struct layout at {position}: {wrong}")


def occupancyMaxActiveBlocksPerMultiprocessor(func, blockSize, dynamicSMemSize):
    """``driver.occupancyMaxActiveBlocksPerMultiprocessor``, limited by threads only."""
    _functions[func].check_gpu(current())
    return surface.Device().attributes["MaxThreadsPerMultiProcessor"] // blockSize


def packed_argument(argument: Any) -> tuple[str, bytes, np.dtype | None]:
    """Kind, bytes and dtype of an argument, as CuPy would pass it.

    Raises:
        TypeError: CuPy takes no such argument.
    """
    if argument is None:
        return "p", bytes(8), None
    if isinstance(argument, CNumpyArray):
        argument = argument.val
    address = getattr(getattr(argument, "data", argument), "ptr", None)
    if address is not None:
        return "p", int(address).to_bytes(8, "little"), None
    argument = _PYTHON_TYPES.get(type(argument), lambda same: same)(argument)
    if isinstance(argument, np.ndarray) and argument.size != 1:
        raise TypeError(f"array with size {argument.size} (expected 1) is passed to a kernel")
    if not isinstance(argument, (np.ndarray, np.generic)):
        raise TypeError(f"Unsupported type {type(argument)}")
    dtype = argument.dtype
    kind = {"b": "i", "u": "i", "i": "i", "f": "f"}.get(dtype.kind, "s")
    return kind, argument.tobytes(), dtype


def _tables(machine: Machine, contents: Sequence[bytes]) -> list[tuple[int, int]]:
    """Device memory whose address is the first word of a struct argument; it is read too."""
    found = []
    for content in contents:
        address = int.from_bytes(content[:8], "little")
        slot = machine.heap.find(address)
        if len(content) > 8 and slot is not None:
            owner = slot.owner(address, machine.number)
            start, size = (owner.start, owner.nbytes) if owner else (address, 8)
            found.append((start, start + size))
    return found


def _check_declared(
    machine: Machine,
    call: Call,
    touched: Sequence[Access],
    promised: Declared,
    tables: list[tuple[int, int]],
) -> None:
    readable = [*promised.read, *promised.written, *tables]
    for start, end, kind in touched:
        for wanted, allowed in ((WRITE, promised.written), (READ, readable)):
            if kind & wanted and not _covered(start, end, allowed):
                verb = "writes" if wanted == WRITE else "reads"
                machine.fail(f"undeclared: {call.what} {verb} {start:#x} to {end:#x}")


def _covered(start: int, end: int, allowed: Sequence[tuple[int, int]]) -> bool:
    for low, high in sorted(allowed):
        if low <= start < high:
            start = high
        if start >= end:
            return True
    return False


@contextmanager
def _of_the_driver():
    """Inside, errors of a failed GPU come from the driver, not from the runtime."""
    try:
        yield
    except surface.CUDARuntimeError as error:
        raise surface.CUDADriverError(error.status) from None
