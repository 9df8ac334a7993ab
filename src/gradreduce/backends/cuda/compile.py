"""Compiles the shipped ``.cu`` files with NVRTC for each GPU.

One lazy program for each instantiation that is asked for: NVRTC takes 0.05 to 0.1 s for it, and
CuPy keeps the result on disk, keyed by the text (into which headers are pasted) and the options.
"""

from __future__ import annotations

from typing import Any

import cupy

from gradreduce.device import Kernel, ModuleLock, Template
from gradreduce.device.kernel import OPTIONS, kernel_text

__all__ = ["function", "is_compiled"]

_functions: dict[tuple[Kernel, Template, int], Any] = {}
_lock = ModuleLock()


def function(kernel: Kernel, template: Template, ordinal: int) -> Any:
    """Returns the function of one instantiation on the current GPU, ``ordinal``.

    Called as ``function(grid, block, arguments, stream=…)``.

    Raises:
        RuntimeError: NVRTC refused the text; its messages point into the ``.cu`` file.
    """
    key = (kernel, template, ordinal)
    found = _functions.get(key)
    if found is None:
        with _lock.lock:
            found = _functions.get(key)
            if found is None:
                found = _functions[key] = _compile(kernel, template)
    return found


def is_compiled(kernel: Kernel, template: Template, ordinal: int) -> bool:
    """Whether ``function`` is already compiled and loaded."""
    return (kernel, template, ordinal) in _functions


def _compile(kernel: Kernel, template: Template) -> Any:
    expression = kernel.expression(template)
    text = kernel_text(kernel.source)
    try:
        module = cupy.RawModule(code=text, options=OPTIONS, name_expressions=(expression,))
        # .kernel is the loaded function of the current GPU: RawKernel would look it up each call.
        return module.get_function(expression).kernel
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(f"NVRTC cannot compile {expression}:\n{error}") from error
