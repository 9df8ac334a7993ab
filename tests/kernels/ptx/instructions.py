"""What each PTX instruction computes: a table from its full name to a function of NumPy arrays.

It has what NVRTC makes of the kernels, and what mutants make of that. A name that is not in the
table is unknown, and ends the run of an entry. A float instruction without a rounding, such as
``add.f32``, is not in it: ptxas may fuse it with another one.

Source: NVIDIA's PTX ISA 9.0, "Instruction Set".
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np

Array = np.ndarray
TYPES: dict[str, np.dtype] = {
    f"{kind}{bits}": np.dtype(f"{dtype}{bits // 8}")
    for kind, dtype in (("u", "u"), ("s", "i"), ("b", "u"))
    for bits in (8, 16, 32, 64)
}
TYPES |= {f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)}
TYPES["pred"] = np.dtype(bool)
INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
BITS, FLOATS = ("b16", "b32", "b64"), ("f32", "f64")
MODES = ("rn", "rz")  # of rounding: to nearest, towards zero


class Operation(NamedTuple):
    """What an instruction computes."""

    result: str  # the type of what it writes
    sources: tuple[str, ...]  # types of what it reads
    function: Callable  # from arrays of these types to one array


def bits_of(kind: str) -> int:
    return 8 * TYPES[kind].itemsize


# ---- floats -------------------------------------------------------------------------------------

LIBM = ctypes.CDLL("libm.so.6")
TOWARDS_ZERO = 0xC00000 if platform.machine() == "aarch64" else 0xC00


def floating(function: Callable, mode: str = "rn") -> Callable:
    """``function`` in a rounding mode, with the one NaN that arithmetic of float32 makes."""

    def run(*sources: Array) -> Array:
        LIBM.fesetround(TOWARDS_ZERO if mode == "rz" else 0)  # of NumPy's arithmetic and of libm's
        try:
            found = function(*sources)
        finally:
            LIBM.fesetround(0)
        if found.dtype != np.float32:
            return found
        bits = np.where(np.isnan(found), np.uint32(0x7FFFFFFF), found.view(np.uint32))
        return bits.view(np.float32)

    return run


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c``, rounded once."""
    double = a.dtype == np.float64
    call = LIBM.fma if double else LIBM.fmaf
    real = ctypes.c_double if double else ctypes.c_float
    call.argtypes, call.restype = [real] * 3, real
    return np.frompyfunc(call, 3, 1)(a, b, c).astype(a.dtype)


# ---- integers -----------------------------------------------------------------------------------


def high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    return (a.astype(object) * b.astype(object) >> 8 * a.itemsize).astype(a.dtype)


def divided(a: Array, b: Array) -> Array:
    """The quotient, towards zero."""
    if (b == 0).any():
        raise ArithmeticError("a division by zero")
    return (a - np.fmod(a, b)) // b


def shifted_left(a: Array, count: Array) -> Array:
    width = 8 * a.itemsize
    return np.where(count < width, a << np.minimum(count, width - 1).astype(a.dtype), 0)


def shifted_right(a: Array, count: Array) -> Array:
    """A count beyond the width leaves copies of the sign, or zeros."""
    width = 8 * a.itemsize
    shifted = a >> np.minimum(count, width - 1).astype(a.dtype)
    return np.where(count < width, shifted, shifted >> a.dtype.type(1))


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """Any four of the eight bytes of ``a`` and ``b``; bit 3 of a choice copies the byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.uint32(0)
    for k in range(4):
        choice = selector.astype(np.uint64) >> np.uint64(4 * k)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
        byte = np.where(choice & np.uint64(8), sign, byte)
        found = found | (byte << np.uint64(8 * k)).astype(np.uint32)
    return found


def extracted(a: Array, place: Array, size: Array) -> Array:
    """So many bits from a place on; above them copies of the last one if ``a`` is signed."""
    width = np.uint32(8 * a.itemsize)
    place, size = place & np.uint32(0xFF), size & np.uint32(0xFF)
    end = np.minimum(place + size, width)
    top = shifted_left(a, width - end)  # with the last bit at the end of the word
    found = shifted_right(top, np.minimum(width - end + place, width))
    return np.where(size == 0, a.dtype.type(0), found)


# ---- conversions and comparisons ----------------------------------------------------------------


def converted(to: str, mode: str = "rn") -> Callable:
    """A conversion to an integer or float type; not from a float to an integer."""

    def convert(values: Array) -> Array:
        found = values.astype(TYPES[to])
        if to == "f16":  # NumPy rounds it to nearest in any mode
            found = np.where(np.isnan(values), np.uint16(0x7FFF), found.view(np.uint16))
            if mode == "rz":
                above = np.abs(found.view(np.float16).astype(values.dtype)) > np.abs(values)
                found = found - above.astype(np.uint16)
            found = found.view(np.float16)
        return found

    return convert


COMPARISONS: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def comparisons(kind: str) -> dict[str, Callable]:
    """Those of a type, by the name in ``setp``. ``ne`` of floats is false for NaN."""
    if kind[0] != "f":
        return COMPARISONS
    return COMPARISONS | {
        "ne": lambda a, b: (a != b) & ~unordered(a, b),
        "neu": np.not_equal,
        "equ": lambda a, b: (a == b) | unordered(a, b),
    }


# ---- the table ----------------------------------------------------------------------------------

TABLE: dict[str, Operation] = {}


def add(name: str, kinds: str, function: Callable) -> None:
    """Adds an instruction; ``kinds`` are the types of its result and then of its sources."""
    result, *sources = kinds.split()
    TABLE[name] = Operation(result, tuple(sources), function)


def _integers(kind: str) -> None:
    for name, function in {
        "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "mul.hi": high, "div": divided,
        "min": np.minimum, "max": np.maximum,
    }.items():  # fmt: skip
        add(f"{name}.{kind}", f"{kind} {kind} {kind}", function)
    add(f"mad.lo.{kind}", f"{kind} {kind} {kind} {kind}", lambda a, b, c: a * b + c)
    if kind[0] == "s":
        add(f"neg.{kind}", f"{kind} {kind}", np.negative)
    if (bits := bits_of(kind)) < 64:
        wide = f"{kind[0]}{2 * bits}"
        to = TYPES[wide]
        add(f"mul.wide.{kind}", f"{wide} {kind} {kind}", lambda a, b: a.astype(to) * b.astype(to))
    if bits > 16:
        add(f"bfe.{kind}", f"{kind} {kind} u32 u32", extracted)
    add(f"shr.{kind}", f"{kind} {kind} u32", shifted_right)


def _floats(kind: str) -> None:
    arithmetic = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
        "div": (2, np.divide), "sqrt": (1, np.sqrt), "rcp": (1, np.reciprocal), "fma": (3, fma),
    }  # fmt: skip
    for (name, (count, function)), mode in product(arithmetic.items(), MODES):
        add(f"{name}.{mode}.{kind}", f"{kind} " * (1 + count), floating(function, mode))
    add(f"neg.{kind}", f"{kind} {kind}", np.negative)


def _conversions() -> None:
    integers = (*INTEGERS, "u8", "s8")
    for to, of in product(integers, integers):
        add(f"cvt.{to}.{of}", f"{to} {of}", converted(to))
    for to, of, mode in product(FLOATS, integers, MODES):
        add(f"cvt.{mode}.{to}.{of}", f"{to} {of}", floating(converted(to), mode))
    for to, of in (("f32", "f16"), ("f64", "f32")):
        add(f"cvt.{to}.{of}", f"{to} {of}", floating(converted(to)))
    for mode, (to, of) in product(MODES, (("f32", "f64"), ("f16", "f32"))):
        add(f"cvt.{mode}.{to}.{of}", f"{to} {of}", floating(converted(to, mode), mode))


for _kind in INTEGERS:
    _integers(_kind)
for _kind in (*BITS, "pred"):
    for _name, _function in (("and", np.bitwise_and), ("or", np.bitwise_or)):
        add(f"{_name}.{_kind}", f"{_kind} {_kind} {_kind}", _function)
    add(f"not.{_kind}", f"{_kind} {_kind}", np.invert)
for _kind in BITS:
    add(f"shl.{_kind}", f"{_kind} {_kind} u32", shifted_left)
for _kind in FLOATS:
    _floats(_kind)
for _kind in (*INTEGERS, *BITS, *FLOATS):
    for _name, _function in comparisons(_kind).items():
        add(f"setp.{_name}.{_kind}", f"pred {_kind} {_kind}", _function)
    add(f"selp.{_kind}", f"{_kind} {_kind} {_kind} pred", lambda a, b, c: np.where(c, a, b))
for _kind in (*INTEGERS, *BITS, *FLOATS, "pred"):
    add(f"mov.{_kind}", f"{_kind} {_kind}", lambda a: a)
add("prmt.b32", "b32 b32 b32 u32", permuted)
_conversions()
