"""Element types, the dtype each is accumulated in, and argument conversion.

A kernel knows eight *elements*: two 16-bit floats, two floats and four unsigned integers. Other
dtypes are viewed as one of these: int32 as uint32 (the sums are equal modulo 2**32, and C++ leaves
signed overflow undefined), complex64 as pairs of float32. The sign matters only where integers are
divided.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from gradreduce.errors import brief

DType = np.dtype  # for annotations in modules that may not import NumPy
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Element:
    """The type that a kernel sees for a dtype.

    Attributes:
        name: the element's dtype name, a key of ``ELEMENTS``.
        lanes: the number of elements in one item of the dtype (2 for complex, else 1).
        viewed: the dtype as which the memory is viewed; None if it is the array's own.
    """

    name: str
    lanes: int = 1
    viewed: np.dtype | None = None


# element name -> (type in the .cu text, dtype in which it is added)
ELEMENTS: dict[str, tuple[str, str]] = {
    "float16": ("f16", "float32"),
    "bfloat16": ("bf16", "float32"),
    "float32": ("float", "float32"),
    "float64": ("double", "float64"),
    "uint8": ("u8", "uint8"),
    "uint16": ("u16", "uint16"),
    "uint32": ("u32", "uint32"),
    "uint64": ("u64", "uint64"),
}
# Name of a template argument -> its type in the .cu text. Signed integers are not elements: most
# kernels see them as unsigned.
C_TYPES: dict[str, str] = {
    **{name: c_type for name, (c_type, _) in ELEMENTS.items()},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
}


def _element_as(name: str, lanes: int = 1) -> Element:
    return Element(name, lanes, np.dtype(name))


# The element that a kernel sees for each dtype (from ``as_dtype``).
ELEMENT_OF: dict[np.dtype, Element] = {
    **{np.dtype(f"float{bits}"): Element(f"float{bits}") for bits in (16, 32, 64)},
    **{np.dtype(f"uint{bits}"): Element(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"int{bits}"): _element_as(f"uint{bits}") for bits in (8, 16, 32, 64)},
    BFLOAT16: Element("bfloat16"),
    np.dtype("complex64"): _element_as("float32", 2),
    np.dtype("complex128"): _element_as("float64", 2),
}
# Maps each dtype to itself: equal dtypes become one object, so code may compare them with `is`.
_CANONICAL: dict[Any, np.dtype] = {dtype: dtype for dtype in ELEMENT_OF}
# NumPy 2.0 converts each of these to some dtype, as every NumPy converts None to float64.
_ABSTRACT = {
    np.number, np.integer, np.signedinteger, np.unsignedinteger,
    np.inexact, np.floating, np.complexfloating,
}  # fmt: skip
_ACCUMULATE = {np.dtype("float16"): np.dtype("float32"), BFLOAT16: np.dtype("float32")}


def as_dtype(dtype: DTypeLike) -> np.dtype:
    """Converts a name, a type or a dtype (PyTorch's too) to a NumPy dtype.

    Equal dtypes return the same object.

    Raises:
        TypeError: not a dtype (None is not), not in native byte order, or a dtype that cannot be
            added (bool, strings, objects, dates).
    """
    try:  # isinstance is five times slower: np.dtype has a metaclass
        return _CANONICAL[dtype]
    except (KeyError, TypeError):  # not canonical, or not hashable
        pass
    if dtype is None or (isinstance(dtype, type) and dtype in _ABSTRACT):
        raise TypeError(f"dtype={brief(dtype)} names no NumPy dtype")
    if type(dtype).__module__ == "torch":  # by name: does not import PyTorch
        dtype = str(dtype).removeprefix("torch.")
    try:
        result = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"dtype={brief(dtype)} names no NumPy dtype") from None
    if result not in ELEMENT_OF:
        raise TypeError(
            f"dtype {result} cannot be added; supported are integers, float16, bfloat16, float32, "
            "float64, complex64 and complex128"
        )
    return _CANONICAL[result]


def as_index(value: Any) -> int:
    """Like ``operator.index``, but rejects booleans of Python and NumPy.

    Raises:
        TypeError: ``value`` is not an integer of any library.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{brief(value)} is a boolean, not an integer")
    return operator.index(value)


def as_count(where: str, number: Any) -> int:
    """Returns a non-negative integer of any library; raises ``ValueError`` otherwise."""
    try:
        count = as_index(number)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"{where}{brief(number)} must be a non-negative integer")
    return count


def is_number(value: Any) -> bool:
    """Whether this is a real number of any library; a boolean and an array are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_positive(name: str, value: Any, *, finite: bool = False) -> float:
    """Validates a number above 0.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is not above 0, or, with ``finite``, is infinite.
    """
    if not is_number(value):
        raise TypeError(f"{name}={brief(value)} must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}={brief(value)} is too large for a float") from None
    if not number > 0 or (finite and number == math.inf):  # NaN is not above 0
        raise ValueError(f"{name}={brief(value)} must be above 0{' and finite' * finite}")
    return number


def as_shape(name: str, shape: Any, *, known: bool = True) -> tuple[Any, ...]:
    """Validates a shape; returns it as a tuple.

    Args:
        name: the name of the argument, for errors.
        shape: the argument.
        known: False allows None as an extent that is unknown.

    Raises:
        TypeError: it is not a list of integers.
        ValueError: an extent is negative.
    """
    try:
        extents = tuple([None if each is None and not known else as_index(each) for each in shape])
    except TypeError:
        what = "integers" if known else "integers and None"
        raise TypeError(f"{name}={brief(shape)} must be a list of {what}") from None
    if any([each is not None and each < 0 for each in extents]):
        raise ValueError(f"{name}={brief(extents)} has a negative extent")
    return extents


def as_flag(name: str, value: Any) -> bool:
    """Converts a boolean of Python or NumPy to ``bool``.

    Raises:
        TypeError: ``value`` is something else, such as an array or a number.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={brief(value)} must be True or False")
    return bool(value)


def accumulate_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype for sums of ``dtype``: float32 for 16-bit floats, else itself."""
    return _ACCUMULATE.get(dtype, dtype)


def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a mean of ``dtype``, as ``tf.math.truediv`` does.

    float32 for integers of 8 and 16 bits, float64 for those of 32 and 64, else ``dtype`` itself.
    """
    if dtype.kind not in "iu":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize < 4 else np.float64)
