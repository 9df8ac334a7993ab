"""Keeps PyTorch's compiler out of this package: in a compiled function a call is a graph break.

Dynamo would trace our functions, with NumPy's arrays in them as tensors: a call would be dozens of
graphs, or fail. It has no public way to leave a package out before it is imported, and we do not
import it: so it is told when somebody does. Nothing here costs a call anything.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_PACKAGE = __file__.removesuffix("opaque.py")
_TRACED = "data_parallel"  # its forward only calls the module, and is traced with that
_REASON = (
    "gradreduce queues work on devices, which cannot be traced: call it outside the compiled "
    "function, or compile without fullgraph=True, where each call is one graph break"
)


def hide_from_compiler() -> None:
    """Tells PyTorch's compiler to trace no function of this package; now, or once it is imported.

    Call it again when modules were imported since.
    """
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None:
        _hide(dynamo)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing itself; sees when Dynamo is imported, once."""

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
    """Hides this package; a Dynamo that has changed too much for that traces it."""
    try:
        _skip_files(dynamo.trace_rules)
        _skip_functions(dynamo)
    except AttributeError as error:  # what is used here is not public
        import logging

        logging.getLogger("gradreduce").warning(
            "torch.compile traces calls of gradreduce, and may fail there: this version of "
            "PyTorch cannot be told to skip them: %s",
            error,
        )


def _skip_files(rules: Any) -> None:
    """Makes Dynamo skip the frames of our files, such as hooks that autograd calls."""
    from pathlib import Path

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
            for name in ("", "__func__", "fget", "fset", "func"):  # of a method, or a property
                function = getattr(member, name, None) if name else member
                while isinstance(function, FunctionType):
                    if function.__module__.startswith(prefix) and not _is_traced(function):
                        yield function
                    function = getattr(function, "__wrapped__", None)


def _is_traced(function: FunctionType) -> bool:
    """Whether Dynamo traces a function: those by which a DataParallel calls its module."""
    return function.__module__.endswith(_TRACED) and function.__name__ in ("forward", "module")
