"""Compiles the shipped ``.cu`` files with NVRTC for each GPU.

Each instantiation is compiled at its first use. ``kernel_cache`` keeps the code for other
processes. CuPy's ``RawModule`` would add ``-ftz=true``, with which subnormals are zeros.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, NamedTuple

import cupy
from cupy.cuda import driver, runtime

from gradreduce.backends.kernel_cache import (
    file_name,
    open_cache,
    read_entry,
    warn_not_cached,
    write_entry,
)
from gradreduce.device import OPTIONS, Kernel, ModuleLock, Template, kernel_text
from gradreduce.errors import INSTALL_CUDA, BackendUnavailableError


class LoadedKernel(NamedTuple):
    """One instantiation on one GPU.

    Attributes:
        function: called as ``function(grid, block, arguments, stream=…)``.
        blocks: the number of full blocks that fit on a multiprocessor at once, given its registers.
    """

    function: Any
    blocks: int


_functions: dict[tuple[Kernel, Template, int], LoadedKernel] = {}
_lock = ModuleLock()
# One for each kernel: NVRTC runs without the interpreter lock, so threads compile in parallel. The
# GPUs share it: the second one finds the code in the cache.
_locks: dict[tuple[Kernel, Template], threading.RLock] = {}


def load_kernel(kernel: Kernel, template: Template, ordinal: int, threads: int) -> LoadedKernel:
    """Returns one instantiation for the current GPU.

    Args:
        kernel: the kernel.
        template: the template arguments.
        ordinal: the number of the current GPU.
        threads: the number of threads of a full block.

    Raises:
        BackendUnavailableError: NVRTC is missing.
        RuntimeError: NVRTC cannot compile the text; its messages name lines of the ``.cu`` file.
    """
    key = (kernel, template, ordinal)
    loaded = _functions.get(key)
    if loaded is None:
        with _lock.lock:
            own = _locks.setdefault((kernel, template), threading.RLock())
        with own:
            loaded = _functions.get(key)
            if loaded is None:
                function = _load(kernel, template, ordinal)
                blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    function.ptr, threads, 0
                )
                loaded = _functions[key] = LoadedKernel(function, blocks)
    return loaded


def _load(kernel: Kernel, template: Template, ordinal: int) -> Any:
    expression = kernel.expression(template)
    try:
        name, _, code = _code(kernel, expression, ordinal).partition(b"\0")
        module = cupy.cuda.function.Module()
        module.load(code)
        return module.get_function(name.decode())
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(f"NVRTC cannot compile {expression}:\n{error}") from error
    except RuntimeError as error:
        if isinstance(error, runtime.CUDARuntimeError | driver.CUDADriverError):
            raise
        raise BackendUnavailableError(  # CuPy finds no libnvrtc
            f"CuPy cannot compile a kernel ({str(error).strip()}); {INSTALL_CUDA}"
        ) from error


def _code(kernel: Kernel, expression: str, ordinal: int) -> bytes:
    """Returns what ``compile_code`` returns; from the cache if possible."""
    text = kernel_text(kernel.source)
    capability = cupy.cuda.Device(ordinal).compute_capability
    # CuPy adds options of its own, such as the architecture.
    compiler = f"NVRTC {cupy.cuda.nvrtc.getVersion()}, CuPy {cupy.__version__}"
    key = "\0".join([text, *OPTIONS, expression, capability, compiler]).encode()
    entry = file_name(f"{kernel.name}-sm_{capability}", key, ".cubin")
    with suppress(OSError), open_cache() as folder:
        cached = read_entry(folder / entry, key)
        if cached is not None:
            return cached
    compiled = compile_code(text, expression)
    try:
        with open_cache() as folder:
            write_entry(folder / entry, key, compiled)
    except OSError as error:
        warn_not_cached(error)
    return compiled


def compile_code(text: str, expression: str) -> bytes:
    """Returns the name of the function, a zero byte and its code, for the current GPU."""
    code, names = cupy.cuda.compiler.compile_using_nvrtc(
        text, OPTIONS, name_expressions=(expression,), cache_in_memory=True
    )
    return bytes(names[expression].encode() + b"\0" + code)
