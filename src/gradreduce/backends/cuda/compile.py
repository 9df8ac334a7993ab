"""Compiles the shipped ``.cu`` files with NVRTC for each GPU.

Each instantiation is compiled at its first use, in 0.05 to 0.1 s. CuPy keeps the result on disk,
keyed by the text (with headers inlined) and the options.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy

from gradreduce.device import Kernel, ModuleLock, Template
from gradreduce.device.kernel import OPTIONS, kernel_text
from gradreduce.errors import BackendUnavailableError, install_hint


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


def load_kernel(kernel: Kernel, template: Template, ordinal: int, threads: int) -> LoadedKernel:
    """Returns one instantiation for the current GPU.

    Args:
        kernel: the kernel.
        template: the template arguments.
        ordinal: the number of the current GPU.
        threads: the number of threads of a full block.

    Raises:
        BackendUnavailableError: NVRTC or its headers are missing, or CuPy cannot write its cache.
        RuntimeError: NVRTC cannot compile the text; its messages name lines of the ``.cu`` file.
    """
    key = (kernel, template, ordinal)
    found = _functions.get(key)
    if found is None:
        with _lock.lock:
            found = _functions.get(key)
            if found is None:
                function = _compile(kernel, template)
                blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    function.ptr, threads, 0
                )
                found = _functions[key] = LoadedKernel(function, blocks)
    return found


def _compile(kernel: Kernel, template: Template) -> Any:
    expression = kernel.expression(template)
    text = kernel_text(kernel.source)
    try:
        module = cupy.RawModule(code=text, options=OPTIONS, name_expressions=(expression,))
        # .kernel is the loaded function of the current GPU, which RawKernel would look up in each
        # call.
        return module.get_function(expression).kernel
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(f"NVRTC cannot compile {expression}:\n{error}") from error
    except RuntimeError as error:
        if hasattr(error, "status"):  # of the driver
            raise
        raise BackendUnavailableError(  # CuPy finds no libnvrtc, or no headers of CUDA
            f"CuPy cannot compile a kernel ({error}); {install_hint('cuda13')}"
        ) from error
    except OSError as error:
        raise BackendUnavailableError(
            f"CuPy cannot write its cache of compiled kernels ({error}): set CUPY_CACHE_DIR to a "
            "folder that this process can write"
        ) from error
