"""The methods and operators of NumPy arrays, for Variables and traced values.

Each calls ``__array_ufunc__`` or ``__array_function__`` of its class, like NumPy's functions. Our
functions that accept such values (``gr.add_n``) are decorated with ``traceable``, and dispatch
calls in the same way.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_P = ParamSpec("_P")
_R = TypeVar("_R")


def traceable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates ``function`` so that traced values and Variables handle the call.

    Such values are found among the arguments, and in lists and tuples that are arguments.
    """

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for arg in (*args, *kwargs.values()):
            for each in arg if isinstance(arg, list | tuple) else (arg,):
                if isinstance(each, Traceable):
                    return each.__array_function__(  # type: ignore[no-any-return]
                        wrapper, (), args, kwargs
                    )
        return function(*args, **kwargs)

    return wrapper


@traceable
def astype(x: Any, dtype: Any) -> Any:
    """Converts ``x`` to another dtype."""
    return x.astype(dtype)


@traceable
def index_into(x: Any, index: Any) -> Any:
    """``x[index]``, with basic or advanced indexing as in NumPy."""
    return x[index]


def _make_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method that calls a NumPy function with the same arguments."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = function.__name__
    method.__doc__ = (
        f"Returns ``np.{function.__name__}`` of the value, with the arguments of that function."
    )
    return method


class Traceable(NDArrayOperatorsMixin):
    """Base class with the operators, methods and attributes of a NumPy array."""

    __slots__ = ()
    __array_priority__ = 1000  # above CuPy's 100

    dtype: Any

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @abstractmethod
    def numpy(self) -> Any:
        """A copy of the value in host memory, as a constant."""

    @abstractmethod
    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs ``function`` on arguments that contain this value; see NumPy's NEP 18."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def T(self: Any) -> Any:  # NumPy's name
        """The transposed value."""
        return np.transpose(self)

    @property
    def mT(self: Any) -> Any:  # NumPy's name
        """The value with its last two axes swapped."""
        return np.swapaxes(self, -1, -2)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return index_into(self, index)

    def item(self, *index: Any) -> Any:
        """Returns an element as a Python number.

        In a loss it has no gradient. The host waits for the value.

        Args:
            index: the position, as in ``numpy.ndarray.item``; may be left out for one element.
        """
        return self.numpy().item(*index)

    def tolist(self) -> Any:
        """Returns the elements as a nested list of Python numbers.

        In a loss they have no gradients. The host waits for the values.
        """
        return self.numpy().tolist()

    def astype(self, dtype: Any, *, copy: bool = True) -> Any:
        """Returns a copy of the value in another dtype; ``copy`` has no effect."""
        return astype(self, dtype)

    def reshape(self: Any, *shape: Any, order: Any = "C") -> Any:
        """Returns ``np.reshape`` of the value; ``shape`` is a tuple or several integers."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order)

    def flatten(self: Any, order: Any = "C") -> Any:
        """Returns a 1-D copy of the value."""
        return np.copy(np.ravel(self, order))

    def transpose(self: Any, *axes: Any) -> Any:
        """Returns ``np.transpose`` of the value; ``axes`` is a tuple or several integers."""
        return np.transpose(self, (axes[0] if len(axes) == 1 else axes) or None)


def holds_traceable(value: Any, cls: type = Traceable) -> bool:
    """Whether an argument, or an element of a list or tuple, is ``Traceable``, or of a subclass."""
    within = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, cls) for each in within)


for _name in (
    "all", "any", "argmax", "argmin", "argsort", "clip", "copy", "cumsum", "diagonal", "dot", "max",
    "mean", "min", "nonzero", "prod", "ravel", "repeat", "round", "squeeze", "std", "sum",
    "swapaxes", "take", "trace", "var",
):  # fmt: skip
    setattr(Traceable, _name, _make_method(getattr(np, _name)))
