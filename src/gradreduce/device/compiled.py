"""The shipped ``.cu`` text, built for the CPU by g++; never decides what to run.

Three builds of the same text:

* ``fast``: one CUDA thread as a compile-time constant, so that g++ vectorises the kernel's plain
  loop; callers split the chunks over host threads. 7 to 70 times faster than looping over threads.
* ``exact``: every block and thread of a launch in turn, 16-byte vectors and tails as on a GPU.
* ``sanitized``: exact under AddressSanitizer and UBSan; the process must preload libasan.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gradreduce.errors import BackendUnavailableError

from .kernel import Kernel, Template, kernel_text
from .table import TABLE

__all__ = ["BUILDS", "HostKernel", "find_compiler", "host_kernel"]

_COMMON = ("-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas")
# -ffp-contract=off: g++ would fuse w -= rate*g into one rounding and differ from NumPy in 1 to 9 %
# of float32 results. -fno-strict-aliasing: a kernel reads any element type as 16-byte vectors.
_VALUES = ("-ffp-contract=off", "-fno-strict-aliasing")
BUILDS: dict[str, tuple[str, ...]] = {
    "fast": ("-O3", "-march=native", "-DGRADREDUCE_FAST", *_COMMON, *_VALUES),
    "exact": ("-O1", *_COMMON, *_VALUES),
    "sanitized": (
        "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
        *_COMMON, *_VALUES,
    ),
}  # fmt: skip
_SCALARS: dict[str, tuple[str, Any]] = {
    "int64": ("long long", ctypes.c_longlong),
    "float64": ("double", ctypes.c_double),
}
_LOCK = threading.Lock()


class HostKernel:
    """One kernel's entries in a shared object, callable from any thread (ctypes drops the GIL)."""

    def __init__(self, kernel: Kernel, library: ctypes.CDLL) -> None:
        arguments = [_SCALARS[kind][1] for _, kind in kernel.scalars]
        self._entries: dict[Template, Any] = {}
        for position, template in enumerate(kernel.templates):
            entry = library[f"run_{position}"]
            entry.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, *arguments]
            entry.restype = None
            self._entries[template] = entry

    def run(
        self,
        template: Template,
        table: int,
        scalars: Sequence[int | float],
        geometry: tuple[int, int] = (1, 1),
    ) -> None:
        """Runs the chunks that ``table`` names.

        Args:
            template: which instantiation; one of ``kernel.templates``.
            table: the address of one element of ``TABLE``.
            scalars: as the kernel declares them.
            geometry: blocks, and threads of a block; the fast build has but one of each.
        """
        self._entries[template](table, *geometry, *scalars)


_loaded: set[tuple[Kernel, str]] = set()


def is_loaded(kernel: Kernel, build: str) -> bool:
    """Whether ``host_kernel`` has nothing to build."""
    return (kernel, build) in _loaded


@cache
def host_kernel(kernel: Kernel, build: str) -> HostKernel:
    """Builds ``kernel`` (or finds the build in the cache) and loads it; blocks for seconds.

    Raises:
        BackendUnavailableError: no g++, or libasan is not preloaded for the sanitized build.
        RuntimeError: g++ refused the text; its messages point into the ``.cu`` file.
    """
    # Asked first: libasan ends the process that loads it late.
    if build == "sanitized" and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise BackendUnavailableError(
            "kernels='sanitized' needs LD_PRELOAD=$(g++ -print-file-name=libasan.so) when Python "
            "starts"
        )
    with _LOCK:
        path = _build(_host_text(kernel), kernel.name, build)
        try:
            found = HostKernel(kernel, ctypes.CDLL(str(path)))
            _loaded.add((kernel, build))
            return found
        except OSError as error:
            raise BackendUnavailableError(
                f"the {build} build of {kernel.name} does not load: {error}"
            ) from error


def _host_text(kernel: Kernel) -> str:
    """The shipped text, and one C entry for each instantiation, with the layouts asserted."""
    parts = [kernel_text(kernel.source), '#line 1 "compiled.py"\n#include <cstddef>\n']
    parts.append(f'static_assert(sizeof(Table) == {TABLE.itemsize}, "Table");\n')
    for field in TABLE.names or ():
        offset = TABLE.fields[field][1]  # type: ignore[index]  # a structured dtype has fields
        parts.append(f'static_assert(offsetof(Table, {field}) == {offset}, "Table.{field}");\n')
    parameters = "".join(f", {_SCALARS[kind][0]} {name}" for name, kind in kernel.scalars)
    call = ", ".join(["*table", *(name for name, _ in kernel.scalars)])
    for position, template in enumerate(kernel.templates):
        parts.append(
            f'extern "C" void run_{position}'
            f"(const Table* table, unsigned grid, unsigned block{parameters}) {{\n"
            "#if defined(GRADREDUCE_FAST)\n"
            f"    (void)grid; (void)block; {kernel.expression(template)}({call});\n"
            "#else\n"
            "    gridDim = {grid, 1, 1}; blockDim = {block, 1, 1};\n"
            "    for (unsigned b = 0; b < grid; ++b) for (unsigned t = 0; t < block; ++t) {\n"
            "        blockIdx = {b, 0, 0}; threadIdx = {t, 0, 0};\n"
            f"        {kernel.expression(template)}({call});\n"
            "    }\n"
            "#endif\n"
            "}\n"
        )
    return "".join(parts)


def find_compiler(build: str) -> str:
    """The path of g++.

    Raises:
        BackendUnavailableError: there is none.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        face = "compiled" if build == "fast" else build
        raise BackendUnavailableError(
            f"kernels={face!r} builds the CUDA text for the CPU and needs g++, which is not on "
            "PATH; install g++, or use kernels='numpy'"
        )
    return compiler


def _build(text: str, name: str, build: str) -> Path:
    """The shared object of ``text``, from the cache if text, flags and compiler are the same."""
    compiler = find_compiler(build)
    flags = BUILDS[build]
    key = "\0".join([text, *flags, _target(compiler)])
    folder = _cache_folder()
    path = folder / f"{name}-{build}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, made = Path(scratch) / f"{name}.cpp", Path(scratch) / path.name
        source.write_text(text, encoding="utf-8")
        command = [compiler, *flags, "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ refused the {build} build of {name}:\n{done.stderr}")
        made.replace(path)  # atomic: another process may be building the same
    return path


@cache
def _target(compiler: str) -> str:
    """What the compiler predefines on this CPU: its version and every instruction set."""
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _cache_folder() -> Path:
    """A folder that only this user can write; shared objects are loaded from it."""
    try:
        folder = Path.home() / ".cache" / "gradreduce"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or a read-only one: this process only
        folder = Path(tempfile.mkdtemp(prefix="gradreduce-"))
    return folder
