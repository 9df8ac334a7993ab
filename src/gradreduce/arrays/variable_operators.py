"""Operators of a Variable: it is read first, then its value computes.

Inside a loss the value is a traced one, elsewhere a plain array.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .convert import kind_of
from .trace_context import Traceable, holds_traceable, named_arguments

# NumPy's functions that write their first argument, and how they call it.
_WRITING = {
    "copyto": "dst", "fill_diagonal": "a", "place": "arr", "put": "a", "put_along_axis": "arr",
    "putmask": "a", "nan_to_num": "x",
}  # fmt: skip


def _before(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: operation(self.read(_library(other)), other)


def _after(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: operation(other, self.read(_library(other)))


def _library(other: Any) -> str | None:
    """Returns the library whose array is read to compute with ``other``; None: NumPy or CuPy."""
    try:
        kind = kind_of(other)
    except TypeError:  # a traced value, say
        return None
    return kind if kind in ("torch", "jax") else None


def _alone(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: operation(self.read())


def _swapped(x: Any) -> Any:
    return x.swapaxes(-1, -2)  # arrays of NumPy 1 have no mT


def _method(name: str) -> Callable[..., Any]:
    def call(self: Readable, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.read(), name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = "See the method of NumPy's arrays; called on the value that ``read`` returns."
    return call


def _reject_in_place(self: Any, other: Any) -> NoReturn:
    raise TypeError("a Variable cannot be changed in place: use assign or assign_add")


class Readable(Traceable):
    """Operators and array protocols of an object that is read before it is computed with.

    ``==`` compares identity, since Variables are keys of dictionaries.
    """

    __array_priority__ = 1000  # above CuPy's 100

    @abstractmethod
    def read(self, output_type: str | None = None) -> Any:
        """Returns the value."""

    @abstractmethod
    def _make_like(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs NumPy's creating ``function`` on the value's device, without reading the value."""

    __add__, __radd__ = _before(operator.add), _after(operator.add)
    __sub__, __rsub__ = _before(operator.sub), _after(operator.sub)
    __mul__, __rmul__ = _before(operator.mul), _after(operator.mul)
    __truediv__, __rtruediv__ = _before(operator.truediv), _after(operator.truediv)
    __floordiv__, __rfloordiv__ = _before(operator.floordiv), _after(operator.floordiv)
    __mod__, __rmod__ = _before(operator.mod), _after(operator.mod)
    __divmod__, __rdivmod__ = _before(divmod), _after(divmod)
    __pow__, __rpow__ = _before(operator.pow), _after(operator.pow)
    __matmul__, __rmatmul__ = _before(operator.matmul), _after(operator.matmul)
    __lt__, __le__ = _before(operator.lt), _before(operator.le)
    __gt__, __ge__ = _before(operator.gt), _before(operator.ge)
    __getitem__ = _before(operator.getitem)
    __neg__, __pos__, __abs__ = _alone(operator.neg), _alone(operator.pos), _alone(abs)
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = _reject_in_place
    __ifloordiv__ = __imod__ = _reject_in_place

    T = property(_alone(operator.attrgetter("T")), doc="The transposed value.")
    mT = property(_alone(_swapped), doc="The value with its last two axes swapped.")
    # Those of ``autodiff.array_methods``; a test compares the two.
    all, any, argmax = _method("all"), _method("any"), _method("argmax")
    argmin, argsort, astype = _method("argmin"), _method("argsort"), _method("astype")
    clip, copy, cumsum = _method("clip"), _method("copy"), _method("cumsum")
    diagonal, dot, flatten = _method("diagonal"), _method("dot"), _method("flatten")
    item, max, mean = _method("item"), _method("max"), _method("mean")
    min, nonzero, prod = _method("min"), _method("nonzero"), _method("prod")
    ravel, repeat, reshape = _method("ravel"), _method("repeat"), _method("reshape")
    round, squeeze, std = _method("round"), _method("squeeze"), _method("std")
    sum, swapaxes, take = _method("sum"), _method("swapaxes"), _method("take")
    tolist, trace, transpose = _method("tolist"), _method("trace"), _method("transpose")
    var = _method("var")

    if not TYPE_CHECKING:  # which would believe that it has whatever is asked for

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else "; use variable.read() or variable.numpy()"
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __setitem__(self, index: Any, value: Any) -> None:
        _reject_in_place(self, value)

    def __bool__(self) -> bool:
        """True, whatever the value, as for any object without a truth value of its own."""
        return True

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if _is_readable(kwargs.get("out")) or (method == "at" and _is_readable(inputs[0])):
            _reject_in_place(self, None)
        return _call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        if not any(holds_traceable(each) for each in (*args, *kwargs.values())):
            return self._make_like(function, args, kwargs)
        if _writes_readable(function, args, kwargs):
            _reject_in_place(self, None)
        return _call(function, args, kwargs)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs CuPy's own kernels, which do not use NumPy's protocols, on the value."""
        if any(map(_is_readable, (kwargs.get("out"), *args[getattr(kernel, "nin", len(args)) :]))):
            _reject_in_place(self, None)
        return _call(kernel, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs PyTorch functions on the value as a tensor."""
        kwargs = kwargs or {}
        if _writes_tensor(function, args, kwargs):
            _reject_in_place(cls, None)
        return _call(function, args, kwargs, "torch")

    def __jax_array__(self) -> Any:
        return self.read("jax")


def _call(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], output_type: str | None = None
) -> Any:
    """Calls a function with the values of Variables."""
    named = {name: _read(each, output_type) for name, each in kwargs.items()}
    return function(*[_read(each, output_type) for each in args], **named)


def _read(value: Any, output_type: str | None = None) -> Any:
    """Replaces Variables in an argument, list or tuple by their values."""
    if isinstance(value, Readable):
        return value.read(output_type)
    if isinstance(value, list | tuple) and any(isinstance(each, Readable) for each in value):
        within = [_read(each, output_type) for each in value]
        return tuple(within) if isinstance(value, tuple) else within
    return value


def _is_readable(value: Any) -> bool:
    """Whether an argument, or an element of a list or tuple, is ``Readable``."""
    within = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, Readable) for each in within)


def _writes_readable(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a NumPy function would write to a copy of a Variable's value."""
    named = named_arguments(function, args, kwargs)
    if _is_readable(named.get("out")):
        return True
    name = function.__name__
    if name not in _WRITING or (name == "nan_to_num" and named.get("copy", True)):
        return False
    return _is_readable(args[0] if args else kwargs.get(_WRITING[name]))


def _writes_tensor(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a PyTorch function would write a Variable; in-place names end in an underscore."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or kwargs.get("inplace"):
        return _is_readable(args[0] if args else next(iter(kwargs.values())))
    return _is_readable(kwargs.get("out"))
