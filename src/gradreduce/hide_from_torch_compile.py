"""Hides this package from PyTorch's compiler: calls are graph breaks.

Otherwise Dynamo would trace our functions, with NumPy arrays as tensors: a call would become dozens
of graphs, or fail. Dynamo has no public way to exclude a package before Dynamo is imported, and we
do not import it. So this module waits for its import. Calls of this package get no slower.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_PACKAGE = __file__.removesuffix("hide_from_torch_compile.py")
_TRACED = "data_parallel"  # its forward only calls the user's module, and must be traced
_REASON = (
    "gradreduce queues work on devices, which cannot be traced: call it outside the compiled "
    "function, or compile without fullgraph=True, where each call is one graph break"
)


def hide_from_compiler() -> None:
    """Tells PyTorch's compiler not to trace this package; now, or when it is imported.

    Call it again after more modules of this package were imported.
    """
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None:
        _hide(dynamo)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import finder that detects the import of Dynamo, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of Dynamo, which then calls ``_hide``; None for any other module."""
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hide(module: ModuleType) -> None:
                execute(module)
                _hide(module)

            spec.loader.exec_module = execute_and_hide  # type: ignore[method-assign]
        return spec


def _hide(dynamo: Any) -> None:
    """Hides this package; if Dynamo's internals have changed, logs a warning instead."""
    try:
        _skip_files(dynamo.trace_rules)
        _skip_functions(dynamo)
    except AttributeError as error:  # these functions are not public
        logging.getLogger("gradreduce").warning(
            "torch.compile traces calls of gradreduce, and may fail there: this version of "
            "PyTorch cannot be told to skip them: %s",
            error,
        )


def _skip_files(rules: Any) -> None:
    """Makes Dynamo skip the frames of our files, such as hooks that autograd calls."""
    inside = [*Path(_PACKAGE).glob("*"), *Path(_PACKAGE, "torch").glob("*")]
    paths = [str(path) for path in inside if path.stem not in ("torch", _TRACED)]
    if not set(paths).issubset(rules.SKIP_DIRS):
        rules.SKIP_DIRS += paths
        rules._recompile_re()


def _skip_functions(dynamo: Any) -> None:
    """Gives our functions a message for ``fullgraph=True``, and skips all frames inside them."""
    skip = None
    if hasattr(dynamo.eval_frame, "set_code_exec_strategy"):  # not in old versions
        action = dynamo.types.FrameAction.SKIP
        skip = dynamo.types.FrameExecStrategy(action, action)
    for function in _functions():
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        if skip is not None and function.__code__.co_filename.startswith(_PACKAGE):
            dynamo.eval_frame.set_code_exec_strategy(function.__code__, skip)


def _functions() -> Iterator[FunctionType]:
    """Yields the functions and methods of our modules that are imported."""
    prefix = f"{__package__}."
    modules = [each for name, each in list(sys.modules.items()) if name.startswith(prefix)]
    for module in modules:
        classes = filter(inspect.isclass, vars(module).values())
        own = [each for each in classes if each.__module__ == module.__name__]
        for member in [member for owner in (module, *own) for member in vars(owner).values()]:
            for name in ("", "__func__", "fget", "fset", "func"):  # of methods, properties
                function = getattr(member, name, None) if name else member
                while isinstance(function, FunctionType):
                    if function.__module__.startswith(prefix) and not _is_traced(function):
                        yield function
                    function = getattr(function, "__wrapped__", None)


def _is_traced(function: FunctionType) -> bool:
    """Whether Dynamo may trace a function: those by which a DataParallel calls its module."""
    names = ("forward", "module", "_with_buffers", "_without_buffers")
    return function.__module__.endswith(_TRACED) and function.__name__ in names
