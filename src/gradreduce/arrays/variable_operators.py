"""Arithmetic of a Variable: reads it first, then uses its value.

Inside a loss the value is traced; elsewhere it is a plain array.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .array_methods import Traceable, holds_traceable
from .convert import kind_of
from .trace_context import named_arguments
from .types import OutputType

# NumPy's functions that write their first argument.
_WRITING = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
# The module of a library that has functions with NumPy's names.
_FUNCTIONS = {"torch": "torch", "jax": "jax.numpy"}


def _reject_in_place() -> NoReturn:
    raise TypeError("a Variable cannot be changed in place: use assign or assign_add")


class Readable(Traceable):
    """Operators and array protocols of an object that must be read before it is used.

    ``==`` compares identity, because Variables are keys of dictionaries.
    """

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    @abstractmethod
    def read(self, output_type: OutputType | None = None) -> Any:
        """Returns the value."""

    @abstractmethod
    def _make_like(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs NumPy's creating ``function`` on the value's device, without reading the value."""

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else "; use variable.read() or variable.numpy()"
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __setitem__(self, index: Any, value: Any) -> None:
        _reject_in_place()

    def __bool__(self) -> bool:
        """Returns True for every value, like objects without a truth value."""
        return True

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if _is_readable(kwargs.get("out")) or (method == "at" and _is_readable(inputs[0])):
            _reject_in_place()
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return _call(function, inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if not any(holds_traceable(each) for each in (*args, *kwargs.values())):
            return self._make_like(function, args, kwargs)
        named = named_arguments(function, args, kwargs)
        in_place = function.__name__ in _WRITING or named.get("copy") is False  # of nan_to_num
        if _is_readable([*args, *kwargs.values()][0] if in_place else named.get("out")):
            _reject_in_place()
        return _call(function, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs CuPy's own kernels, which do not use NumPy's protocols, on the value."""
        if any(map(_is_readable, (kwargs.get("out"), *args[getattr(kernel, "nin", len(args)) :]))):
            _reject_in_place()
        return _call(kernel, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs PyTorch functions on the value as a tensor."""
        kwargs = kwargs or {}
        if _writes_tensor(function, args, kwargs):
            _reject_in_place()
        named = {name: _read(each, "torch") for name, each in kwargs.items()}
        return function(*[_read(each, "torch") for each in args], **named)

    def __jax_array__(self) -> Any:
        return self.read("jax")


def _call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a NumPy function with the values of Variables.

    With an array of PyTorch or JAX, and in a loss of JAX, calls their function of this name.
    """
    library = _library(args)
    named = {name: _read(each, library) for name, each in kwargs.items()}
    values = [_read(each, library) for each in args]
    library = library or _library(values)
    if library is not None:
        name = "pow" if function.__name__ == "power" else function.__name__
        function = getattr(sys.modules[_FUNCTIONS[library]], name, function)
    return function(*values, **named)


def _library(values: Any) -> str | None:
    """Returns the library of a PyTorch or JAX array among the values; None without one."""
    for value in values:
        if isinstance(value, Traceable):
            continue
        try:
            kind = kind_of(value)
        except TypeError:  # for example a slice
            continue
        if kind in _FUNCTIONS:
            return kind
    return None


def _read(value: Any, output_type: Any) -> Any:
    """Replaces Variables in an argument, list or tuple by their values."""
    if isinstance(value, Readable):
        return value.read(output_type)
    if isinstance(value, list | tuple) and _is_readable(value):
        within = [_read(each, output_type) for each in value]
        return tuple(within) if isinstance(value, tuple) else within
    return value


def _is_readable(value: Any) -> bool:
    """Whether an argument, or an element of a list or tuple, is ``Readable``."""
    within = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, Readable) for each in within)


def _writes_tensor(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a PyTorch function would write a Variable: its name ends in an underscore."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or kwargs.get("inplace"):
        return _is_readable(args[0] if args else next(iter(kwargs.values())))
    return _is_readable(kwargs.get("out"))
