"""Builds the shipped ``.cu`` files for the CPU with g++, and caches the builds.

Three builds of the same text:

* ``fast``: compiled for one CUDA thread, so that g++ vectorises the kernel's loop; callers split
  the chunks over host threads. 7 to 70 times faster than a loop over CUDA threads.
* ``exact``: runs every block and thread of a launch in turn, with 16-byte vectors and tails as on a
  GPU.
* ``sanitized``: ``exact`` with AddressSanitizer and UBSan; the process must preload libasan.

``kernel_cache`` keeps the builds for other processes.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from gradreduce.backends.kernel_cache import (
    file_name,
    open_cache,
    read_entry,
    warn_not_cached,
    write_entry,
)
from gradreduce.device import TABLE, Kernel, ModuleLock, Template, kernel_text
from gradreduce.errors import BackendUnavailableError

_COMMON = ("-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas")
# -ffp-contract=off: otherwise g++ rounds w -= rate*g once, and 1 to 9 % of float32 results differ
# from NumPy's. -fno-strict-aliasing: a kernel reads all element types as 16-byte vectors.
# -fno-math-errno: otherwise a square root is a function call and is not vectorised.
_VALUES = ("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno")
BUILDS: dict[str, tuple[str, ...]] = {
    "fast": ("-O3", "-march=native", "-DGRADREDUCE_FAST", *_COMMON, *_VALUES),
    "exact": ("-O1", *_COMMON, *_VALUES),
    "sanitized": (
        "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
        *_COMMON, *_VALUES,
    ),
}  # fmt: skip
_SCALARS: dict[str, tuple[str, Any]] = {
    "int64": ("long long", ctypes.c_longlong),
    "float64": ("double", ctypes.c_double),
}
_LOCK = ModuleLock()


# The functions of a kernel in a shared library, one for each instantiation. They release the GIL.
# Arguments: the address of a ``TABLE`` struct, first chunk, end chunk (above the first), number of
# blocks, threads per block (both 1 in the fast build), and the scalars that the kernel declares.
HostKernel = dict[Template, Callable[..., None]]


def _entries(kernel: Kernel, library: ctypes.CDLL) -> HostKernel:
    arguments = [_SCALARS[kind][1] for _, kind in kernel.scalars]
    entries: HostKernel = {}
    for position, template in enumerate(kernel.templates):
        entry = library[f"run_{position}"]
        entry.argtypes = [
            ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint, ctypes.c_uint,
            *arguments,
        ]  # fmt: skip
        entry.restype = None
        entries[template] = entry
    return entries


@cache
def host_kernel(kernel: Kernel, build: str) -> HostKernel:
    """Builds and loads ``kernel``, or loads it from the cache; may block for seconds.

    Raises:
        BackendUnavailableError: g++ is missing or does not work, the build cannot be loaded, or
            libasan is not preloaded for the sanitized build.
        RuntimeError: g++ cannot compile the text; its messages name lines of the ``.cu`` file.
    """
    # Check first: libasan ends a process that loads it late.
    if build == "sanitized" and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise BackendUnavailableError(
            "kernels='sanitized' needs LD_PRELOAD=$(g++ -print-file-name=libasan.so) when Python "
            "starts"
        )
    with _LOCK.lock:
        try:
            library = _load(_host_text(kernel), kernel.name, build)
        except OSError as error:
            raise BackendUnavailableError(
                f"the {build} build of {kernel.name} cannot be loaded: {error}; "
                "kernels='numpy' needs no build"
            ) from error
        return _entries(kernel, library)


def _host_text(kernel: Kernel) -> str:
    """Returns the shipped text with one C entry for each instantiation."""
    parts = [kernel_text(kernel.source), '#line 1 "host_compile.py"\n#include <cstddef>\n']
    parts.append(f'static_assert(sizeof(Table) == {TABLE.itemsize}, "Table");\n')
    for field in TABLE.names or ():
        offset = TABLE.fields[field][1]  # type: ignore[index]  # a structured dtype has fields
        parts.append(f'static_assert(offsetof(Table, {field}) == {offset}, "Table.{field}");\n')
    parameters = "".join(f", {_SCALARS[kind][0]} {name}" for name, kind in kernel.scalars)
    call = ", ".join(["part", *(name for name, _ in kernel.scalars)])
    for position, template in enumerate(kernel.templates):
        parts.append(
            f'extern "C" void run_{position}'
            "(const Table* table, long long first_chunk, long long end_chunk, unsigned grid, "
            f"unsigned block{parameters}) {{\n"
            "    Table part = *table;\n"
            "    part.first_chunk = first_chunk; part.end_chunk = end_chunk;\n"
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
    """Returns the path of g++.

    Raises:
        BackendUnavailableError: there is no g++.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        implementation = "compiled" if build == "fast" else build
        raise BackendUnavailableError(
            f"kernels={implementation!r} builds the CUDA text for the CPU and needs g++, which is "
            "not on PATH; install g++, or use kernels='numpy'"
        )
    return compiler


def _load(text: str, name: str, build: str) -> ctypes.CDLL:
    """Loads the shared library of ``text``, from the cache if nothing has changed.

    Raises:
        OSError: the library cannot be loaded.
    """
    compiler = find_compiler(build)
    key = "\0".join([text, *BUILDS[build], _target(compiler)]).encode()
    entry = file_name(f"{name}-{build}", key, ".so")
    # The sanitizer opens the file by its path when it reports an error.
    opened = partial(open_cache, plain_path=build == "sanitized")
    with suppress(OSError), opened() as folder:
        if read_entry(folder / entry, key) is not None:
            return ctypes.CDLL(str(folder / entry))
    scratch = Path(tempfile.mkdtemp(prefix="gradreduce-"))
    try:
        library = _compile(compiler, text, scratch / entry, build)
        try:
            with opened() as folder:
                write_entry(folder / entry, key, library.read_bytes())
                return ctypes.CDLL(str(folder / entry))
        except OSError as error:
            warn_not_cached(error)
            return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(compiler: str, text: str, library: Path, build: str) -> Path:
    """Builds ``library``, and leaves its source beside it.

    Raises:
        RuntimeError: g++ cannot compile the text.
    """
    source = library.with_suffix(".cpp")
    source.write_text(text, encoding="utf-8")
    done = _run([compiler, *BUILDS[build], "-o", str(library), str(source)])
    if done.returncode:
        name = library.name.partition("-")[0]
        raise RuntimeError(
            f"g++ cannot compile the {build} build of {name} (exit status {done.returncode}):\n"
            f"{done.stderr}"
        )
    return library


@cache
def _target(compiler: str) -> str:
    """Returns the compiler's predefined macros: its version and this CPU's instructions.

    Raises:
        BackendUnavailableError: the compiler does not run.
    """
    done = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"])
    if done.returncode:
        raise BackendUnavailableError(
            f"{compiler} does not work (exit status {done.returncode}); repair it, or use "
            f"kernels='numpy':\n{done.stderr}"
        )
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise BackendUnavailableError(
            f"{command[0]} cannot be run: {error}; repair it, or use kernels='numpy'"
        ) from error
