"""Element types, the dtype each is accumulated in, and argument conversion.

One table for the whole library. A kernel knows eight *elements*: two 16-bit floats, two floats
and four unsigned integers. Everything else is a view as one of those: adding int32 modulo
2**32 is adding uint32 (and signed overflow is undefined in C++, unsigned is not), adding
complex64 is adding pairs of float32. Only where integers are divided does the sign count.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from gradreduce.errors import brief

DType = np.dtype  # for modules that name a dtype and import no array library
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Element:
    """The type that a kernel sees for a dtype.

    Attributes:
        name: the element's dtype name, a key of ``ELEMENTS``.
        lanes: how many elements make one item of the dtype (2 for complex, else 1).
        viewed: the dtype to look at the memory as; None if it is the array's own.
    """

    name: str
    lanes: int = 1
    viewed: np.dtype | None = None


# element name -> (type in the .cu text, dtype it is added in)
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
# What a template argument may be named -> its type in the .cu text. The signed integers are no
# elements: by default a kernel sees unsigned ones in their place.
C_TYPES: dict[str, str] = {
    **{name: c_type for name, (c_type, _) in ELEMENTS.items()},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
}


def _viewed(name: str, lanes: int = 1) -> Element:
    return Element(name, lanes, np.dtype(name))


# The element that a kernel sees for each dtype: ``element_of`` without the call.
ELEMENT_OF: dict[np.dtype, Element] = {
    **{np.dtype(f"float{bits}"): Element(f"float{bits}") for bits in (16, 32, 64)},
    **{np.dtype(f"uint{bits}"): Element(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"int{bits}"): _viewed(f"uint{bits}") for bits in (8, 16, 32, 64)},
    BFLOAT16: Element("bfloat16"),
    np.dtype("complex64"): _viewed("float32", 2),
    np.dtype("complex128"): _viewed("float64", 2),
}
# Each to itself: one object for all equal dtypes, which code may compare by identity.
_CANONICAL: dict[Any, np.dtype] = {dtype: dtype for dtype in ELEMENT_OF}
# Of each NumPy 2.0 makes some dtype, as every NumPy makes float64 of None.
_ABSTRACT = {
    np.number, np.integer, np.signedinteger, np.unsignedinteger,
    np.inexact, np.floating, np.complexfloating,
}  # fmt: skip
_ACCUMULATE = {np.dtype("float16"): np.dtype("float32"), BFLOAT16: np.dtype("float32")}


def as_dtype(dtype: DTypeLike) -> np.dtype:
    """Converts a name, a type or a dtype (PyTorch's too) to a NumPy dtype.

    Equal dtypes give the same object.

    Raises:
        TypeError: not a dtype (None is none), not in native byte order, or one that cannot be
            added (bool, strings, objects, dates).
    """
    try:  # isinstance takes five times as long: np.dtype has a metaclass
        return _CANONICAL[dtype]
    except (KeyError, TypeError):  # not canonical, or not hashable
        pass
    if dtype is None or (isinstance(dtype, type) and dtype in _ABSTRACT):
        raise TypeError(f"dtype={brief(dtype)} names no NumPy dtype")
    if type(dtype).__module__ == "torch":  # found by its name: it is not imported for this
        dtype = str(dtype).removeprefix("torch.")
    try:
        found = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"dtype={brief(dtype)} names no NumPy dtype") from None
    if found not in ELEMENT_OF:
        raise TypeError(
            f"dtype {found} cannot be added; supported are integers, float16, bfloat16, float32, "
            "float64, complex64 and complex128"
        )
    return _CANONICAL[found]


def as_index(value: Any) -> int:
    """As ``operator.index``, but rejects booleans of Python and NumPy.

    Raises:
        TypeError: no integer of any library.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{brief(value)} is a boolean, not an integer")
    return operator.index(value)


def as_flag(name: str, value: Any) -> bool:
    """Converts a boolean of Python or NumPy to ``bool``.

    Raises:
        TypeError: anything else, arrays and numbers too.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={brief(value)} must be True or False")
    return bool(value)


def element_of(dtype: np.dtype) -> Element:
    """Returns the element that a kernel sees for ``dtype`` (from ``as_dtype``)."""
    return ELEMENT_OF[dtype]


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
