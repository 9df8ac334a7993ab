"""Builds the CUDA sources so that every load and store of a launch is recorded.

g++ -fsanitize=thread inserts a call before every access; ``recorder.cpp`` replaces the
ThreadSanitizer behind these calls. Takes six times as long as the plain build.
"""

import ctypes
import hashlib
import os
import subprocess
import threading
from functools import cache
from pathlib import Path

import numpy as np

from gradreduce.backends.kernel_cache import cache_folder

from .memory import REGION

_FOLDER = Path(__file__).parent
_FLAGS = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
_RECORDING = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-nostdlib")
_MOST_RUNS = 1 << 16


class Refused(RuntimeError):
    """g++ rejects the source; the text is g++'s message."""


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char), ("size", ctypes.c_uint), ("alignment", ctypes.c_uint))


class Entry:
    """One instantiation of a kernel.

    Attributes:
        parameters: ``(kind, bytes)`` of each: ``p`` pointer, ``i`` integer, ``f`` floating, ``s``
            struct.
    """

    def __init__(self, path: Path) -> None:
        self._recorder = _recorder()  # its symbols, before the library that calls them
        library = ctypes.CDLL(str(path))
        count = ctypes.c_int.in_dll(library, "fake_count").value
        described = (_Parameter * count).in_dll(library, "fake_parameters")
        self.parameters = [(one.kind.decode(), one.size) for one in described]
        self._launch = library.fake_launch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._runs = np.empty(3 * _MOST_RUNS, np.uint64)

    def run(self, arguments: list[bytes], grid: int, block: int) -> tuple[list, int]:
        """Runs a launch; returns the bytes it used, and an address outside the GPUs, or 0."""
        held = [ctypes.create_string_buffer(argument, len(argument) + 16) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self._launch(pointers, grid, block)
        wild = ctypes.c_size_t()
        found = self._recorder.fake_collect(self._runs.ctypes.data, _MOST_RUNS, ctypes.byref(wild))
        if found > _MOST_RUNS:
            raise MemoryError("a launch touches too many separate pieces of memory")
        runs = self._runs[: 3 * found].reshape(-1, 3).tolist()
        return [tuple(run) for run in runs], wild.value


@cache
def _recorder() -> ctypes.CDLL:
    source = (_FOLDER / "recorder.cpp").read_text(encoding="utf-8")
    path = _built(source, "fake_recorder", ("-O2", "-std=c++17", "-fPIC", "-shared"))
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.fake_region.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.fake_collect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.fake_collect.restype = ctypes.c_size_t
    library.fake_region(REGION.start, REGION.end)
    return library


@cache
def entry(text: str, expression: str) -> Entry:
    """Builds one instantiation, or finds the build.

    Raises:
        Refused: g++ does not take the text, or has no such instantiation.
    """
    ignored = "".join(f"fake_ignore(&{name}); " for name in
                      ("gridDim", "blockDim", "blockIdx", "threadIdx"))  # fmt: skip
    source = (
        f"{_with_launcher(text, expression)}"
        'extern "C" int fake_count = Fake::count;\n'
        'extern "C" FakeParameter fake_parameters[Fake::count ? Fake::count : 1] = {};\n'
        '__attribute__((constructor, no_sanitize("thread"))) static void fake_fill() {\n'
        "    for (int i = 0; i < Fake::count; ++i) fake_parameters[i] = Fake::parameters[i];\n}\n"
        'extern "C" __attribute__((no_sanitize("thread")))\n'
        "void fake_launch(void** args, unsigned grid, unsigned block) {\n"
        f"    {ignored}\n"
        "    gridDim = {grid, 1, 1}; blockDim = {block, 1, 1};\n"
        "    for (unsigned b = 0; b < grid; ++b) for (unsigned t = 0; t < block; ++t) {\n"
        "        blockIdx = {b, 0, 0}; threadIdx = {t, 0, 0};\n"
        "        Fake::call(fake_entry, args, std::make_index_sequence<Fake::count>());\n"
        "    }\n}\n"
    )
    return Entry(_built(source, "fake_kernel", (*_FLAGS, *_RECORDING, "-shared"), ("-lgcc",)))


@cache
def layout_faults(text: str, expression: str, position: int, dtype: np.dtype) -> str:
    """The compiler's error for a struct argument of this dtype; empty if it fits."""
    parameter = f"Fake::at<{position}>"
    parts = [_with_launcher(text, expression)]
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]
        parts.append(
            f'static_assert(offsetof({parameter}, {name}) == {offset}, "{name}: offset");\n'
            f"static_assert(sizeof((({parameter}*)0)->{name}) == {field.itemsize}, "
            f'"{name}: size");\n'
        )
    try:
        _built("".join(parts), "fake_layout", (*_FLAGS, "-c"))
    except Refused as error:
        return str(error)
    return ""


def _with_launcher(text: str, expression: str) -> str:
    launcher = (_FOLDER / "launcher.cpp").read_text(encoding="utf-8")
    return (
        f'{text}#line 1 "launcher.cpp"\n{launcher}'
        f"static auto fake_entry = &{expression};\n"
        "typedef FakeEntry<decltype(fake_entry)> Fake;\n"
    )


def _built(source: str, name: str, flags: tuple[str, ...], behind: tuple[str, ...] = ()) -> Path:
    """The product's own cache of builds, with other flags."""
    key = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:24]
    path = cache_folder() / f"{name}-{key}.so"
    if not path.is_file():
        # Another process or thread may build the same.
        made = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        command = ["g++", *flags, "-x", "c++", "-o", str(made), "-", *behind]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(done.stderr)
        made.replace(path)
    return path
