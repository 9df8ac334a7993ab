"""The methods and operators of NumPy arrays, implemented by NumPy's functions.

Each ends in ``__array_ufunc__`` or ``__array_function__`` of its class, which differentiates it.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from gradreduce.arrays.convert import host_array
from gradreduce.arrays.trace_context import Traceable, traceable

from .frameworks import detached


@traceable
def astype(x: Any, dtype: Any) -> Any:
    """Converts ``x`` to another dtype."""
    return x.astype(dtype)


@traceable
def index_into(x: Any, index: Any) -> Any:
    """``x[index]``, with basic or advanced indexing as in NumPy."""
    return x[index]


@traceable
def stop_gradient(x: Any) -> Any:
    """Returns the plain value of ``x``, as a constant (tf.stop_gradient).

    Args:
        x: a traced value, a Variable, an array, a PyTorch tensor or a JAX array, or a list of them.
            In a PyTorch loss, pass ``variable.read("torch")`` of a Variable.

    Returns:
        The array itself, possibly in the memory of a Variable. Do not write to it.
    """
    if isinstance(x, list | tuple):
        within = [stop_gradient(each) for each in x]
        return tuple(within) if isinstance(x, tuple) else within
    return detached(x)


def _forwarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method that calls a NumPy function with the same arguments."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = function.__name__
    method.__doc__ = f"As of an array: ``np.{function.__name__}``."
    return method


def _replacing(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes an operator such as ``+=`` that binds the name to a new value."""
    return lambda self, other: self._replaced(operation(self, other))


class ArrayMethods(NDArrayOperatorsMixin, Traceable):
    """Base class with the operators, methods and attributes of a NumPy array."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as of an array: == compares elements

    dtype: Any
    value: Any

    @abstractmethod
    def copy(self, order: str = "C") -> Any:
        """As the member of a NumPy array."""

    @abstractmethod
    def _replaced(self, made: Any) -> Any:
        """Returns the value that ``self += x`` binds to the name; ``made`` is ``self + x``.

        Raises:
            NotImplementedError: NumPy would also change another value.
            ValueError: ``made`` has another shape.
        """

    @property
    def T(self) -> Any:  # NumPy's name
        """As the member of a NumPy array."""
        return np.transpose(self)

    @property
    def mT(self) -> Any:  # NumPy's name
        """As the member of a NumPy array."""
        return np.swapaxes(self, -1, -2)

    def __getitem__(self, index: Any) -> Any:
        return index_into(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "cannot write into a traced value: build the whole array with np.where, np.concatenate "
            "or np.stack"
        )

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else str(self)

    def item(self, *index: Any) -> Any:
        """The number, as a constant."""
        return self.value.item(*index)

    def numpy(self) -> Any:
        """A copy of the value in host memory, as a constant."""
        plain = self.value
        return plain.numpy() if isinstance(plain, ArrayMethods) else host_array(plain).copy()

    def astype(self, dtype: Any, *, copy: bool = True) -> Any:
        """As of an array; always a copy."""
        return astype(self, dtype)

    def reshape(self, *shape: Any, order: Any = "C") -> Any:
        """As the member of a NumPy array."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order)

    def flatten(self, order: Any = "C") -> Any:
        """As the member of a NumPy array."""
        return np.ravel(self, order).copy()

    def transpose(self, *axes: Any) -> Any:
        """As the member of a NumPy array."""
        if len(axes) == 1:
            axes = axes[0]
        return np.transpose(self, axes or None)

    def tolist(self) -> Any:
        """The numbers, as constants."""
        return self.value.tolist()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(np.ndarray, name):
            raise NoMethodError(
                f"ndarray.{name} has no derivative rule; use NumPy's functions, or return a "
                "PyTorch tensor from the loss, which PyTorch differentiates"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


_FORWARDED = (
    "swapaxes", "squeeze", "ravel", "take", "repeat", "dot", "clip", "round", "sum", "mean", "prod",
    "max", "min", "var", "std", "cumsum", "diagonal", "trace", "argmax", "argmin", "argsort",
    "nonzero", "all", "any",
)  # fmt: skip
_IN_PLACE = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
for _name in _FORWARDED:
    setattr(ArrayMethods, _name, _forwarded(getattr(np, _name)))
for _name in _IN_PLACE:
    setattr(ArrayMethods, f"__i{_name}__", _replacing(getattr(operator, f"__{_name}__")))


class NoMethodError(NotImplementedError, AttributeError):
    """A method without a derivative rule; an AttributeError too, for ``hasattr``."""
