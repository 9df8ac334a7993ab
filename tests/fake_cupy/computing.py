"""NumPy's functions on the fake's arrays, with its two protocols, in stream order.

Like CuPy's, these arrays cannot be converted to NumPy's or mixed with them. The result of a call is
always new memory, also where CuPy returns a view.
"""

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .machine import READ, WRITE, current
from .surface import getDevice

SCALARS = (int, float, complex, bool, np.generic)


class Computing(NDArrayOperatorsMixin):
    """Base class of ``ndarray``: computations are queued, and run when their queue does."""

    __array_priority__ = 100
    __hash__ = None

    ndim = property(lambda self: len(self.shape))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        (out,) = kwargs.pop("out", None) or (None,)
        if method != "__call__" or not (out is None or isinstance(out, Computing)):
            return NotImplemented
        for each in inputs:
            if isinstance(each, np.ndarray):
                raise TypeError("Unsupported type <class 'numpy.ndarray'>")
            if not isinstance(each, (Computing, *SCALARS)):
                return NotImplemented
        return self._computed(ufunc, inputs, kwargs, out)

    def __array_function__(self, function, types, args, kwargs):
        if not all(issubclass(each, Computing) for each in types):
            return NotImplemented
        return self._computed(function, args, kwargs)

    def __eq__(self, other):
        """An operator; with NumPy's arrays or from another GPU a comparison on the host."""
        on_host = isinstance(other, np.ndarray) or self.device.id != getDevice()
        return self.get() == other if on_host else np.equal(self, other)

    def all(self):
        return np.all(self)

    def __float__(self):
        return float(self.get())

    def __bool__(self):
        return bool(self.get())

    def astype(self, dtype):
        return self._computed(lambda array: array.astype(dtype), [self], {})

    def _gathered(self, key):
        """``self[key]`` for integer indices."""
        return self._computed(lambda array: array[key], [self], {})

    def _computed(self, function, args, kwargs, out=None):
        operands: list = [] if out is None else [out]
        _seen(args, operands)
        _seen(list(kwargs.values()), operands)
        for each in operands:
            if each.device.id != getDevice():
                current().fail(f"wrong device: CuPy computes on GPU {getDevice()}")
            each._submit("read", READ, lambda memory: None)
        like = _as_plain(args, lambda array: np.ones(array.shape, array.dtype))
        named = {key: _as_plain(each, lambda array: np.ones(array.shape, array.dtype))
                 for key, each in kwargs.items()}  # fmt: skip
        with np.errstate(all="ignore"):
            shown = function(*like, **named)
        if not isinstance(shown, np.ndarray | np.generic):
            return shown
        made = type(self)(shown.shape, shown.dtype) if out is None else out
        if made.shape != shown.shape or not np.can_cast(shown.dtype, made.dtype, "same_kind"):
            raise TypeError(f"{shown.dtype}{shown.shape} does not go into {made.dtype}{made.shape}")
        now = _as_plain(args, lambda array: array._memory())
        named = {
            key: _as_plain(each, lambda array: array._memory()) for key, each in kwargs.items()
        }

        def work(memory):
            with np.errstate(all="ignore"):
                np.copyto(memory, function(*now, **named), casting="same_kind")

        made._submit(getattr(function, "__name__", "call"), WRITE, work)
        return made


def _seen(given, found: list) -> None:
    for each in given:
        if isinstance(each, Computing):
            found.append(each)
        elif isinstance(each, list | tuple):
            _seen(each, found)


def _as_plain(given, shown):
    """Replaces the fake's arrays in arguments by NumPy's."""
    if isinstance(given, Computing):
        return shown(given)
    if isinstance(given, list | tuple):
        return type(given)(_as_plain(each, shown) for each in given)
    return given
