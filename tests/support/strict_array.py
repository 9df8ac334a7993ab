"""An array class like CuPy's that raises when it is converted to NumPy or mixed with it.

As with CuPy, all operations use NumPy's two protocols. A 0-d result is an array, not a NumPy
scalar; ``np.add.at`` does not exist; an operation with a NumPy array is a ``TypeError``.
"""

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

SCALARS = (int, float, complex, bool, np.generic)


class StrictArray(NDArrayOperatorsMixin):
    """Wraps a NumPy array.

    Attributes:
        array: the wrapped array; for tests only.
    """

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, array) -> None:
        self.array = np.asarray(array)

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    T = property(lambda self: StrictArray(self.array.T))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or kwargs.get("out") is not None:
            raise TypeError(f"{ufunc.__name__}.{method} is not for these")
        for each in inputs:
            if not isinstance(each, (StrictArray, *SCALARS)):
                if isinstance(each, np.ndarray):
                    raise TypeError("Unsupported type numpy.ndarray")
                return NotImplemented
        return StrictArray(ufunc(*[_as_plain(each) for each in inputs], **kwargs))

    def __array_function__(self, function, types, args, kwargs):
        if not all(issubclass(each, StrictArray) for each in types):
            return NotImplemented if not any(each is np.ndarray for each in types) else _refuse()
        for each in (*args, *kwargs.values()):
            if isinstance(each, np.ndarray) and function not in (np.take,):
                _refuse()
        named = {name: _as_plain(each) for name, each in kwargs.items()}
        made = function(*[_as_plain(each) for each in args], **named)
        return StrictArray(made) if isinstance(made, np.ndarray | np.generic) else made

    def __getitem__(self, index):
        return StrictArray(self.array[_as_plain(index)])

    def __setitem__(self, index, value) -> None:
        if isinstance(value, np.ndarray):
            _refuse()
        self.array[index] = _as_plain(value)

    def astype(self, dtype):
        return StrictArray(self.array.astype(dtype))

    def copy(self):
        return StrictArray(self.array.copy())

    def item(self):
        return self.array.item()

    def __float__(self):
        return float(self.array)


def _refuse():
    raise TypeError("Unsupported type numpy.ndarray")


def _as_plain(given):
    if isinstance(given, StrictArray):
        return given.array
    if isinstance(given, list | tuple):
        return type(given)(_as_plain(each) for each in given)
    return given
