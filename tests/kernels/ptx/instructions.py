"""What each PTX instruction computes: a table from its full name to a function of NumPy arrays.

A name that is not in the table is unknown, and ends the run of an entry. A float instruction
without a rounding, such as ``add.f32``, is not in it: ptxas may fuse it with another one.

Source: NVIDIA's PTX ISA 9.0, "Instruction Set".
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
CARRY = "cc"  # the type of the carry flag, and its name as an operand, which no text has
TYPES[CARRY] = np.dtype(bool)
INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
BITS, FLOATS = ("b16", "b32", "b64"), ("f32", "f64")


class Operation(NamedTuple):
    """What an instruction computes.

    Attributes:
        results: types of what it writes.
        sources: types of what it reads.
        function: from arrays of these types to one array for each result, or to the only one.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable


def bits_of(kind: str) -> int:
    return 8 * TYPES[kind].itemsize


# ---- rounding -----------------------------------------------------------------------------------

LIBM = ctypes.CDLL("libm.so.6")
_MODES = {"rn": 0, "rm": 0x400, "rp": 0x800, "rz": 0xC00}
if platform.machine() == "aarch64":
    _MODES = {"rn": 0, "rp": 0x400000, "rm": 0x800000, "rz": 0xC00000}


@contextmanager
def rounding(mode: str) -> Iterator[None]:
    """Rounds NumPy's arithmetic, and libm's, in this mode."""
    LIBM.fesetround(_MODES[mode])
    try:
        yield
    finally:
        LIBM.fesetround(_MODES["rn"])


def canonical(values: Array) -> Array:
    """With the one NaN that arithmetic of float32 makes."""
    if values.dtype == np.float32:
        bits = values.view(np.uint32)
        bits = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), bits)
        return bits.view(np.float32)
    return values


def floating(function: Callable, mode: str = "rn") -> Callable:
    """``function`` in a rounding mode."""

    def run(*sources: Array) -> Array:
        if mode == "rn":
            found = function(*sources)
        else:
            with rounding(mode):
                found = function(*sources)
        return canonical(found)

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


def remainder(a: Array, b: Array) -> Array:
    if (b == 0).any():
        raise ArithmeticError("a division by zero")
    return np.fmod(a, b)


def shifted_left(a: Array, count: Array) -> Array:
    width = 8 * a.itemsize
    return np.where(count < width, a << np.minimum(count, width - 1).astype(a.dtype), 0)


def shifted_right(a: Array, count: Array) -> Array:
    """A count beyond the width leaves copies of the sign, or zeros."""
    width = 8 * a.itemsize
    shifted = a >> np.minimum(count, width - 1).astype(a.dtype)
    return np.where(count < width, shifted, shifted >> a.dtype.type(1))


def with_carry(a: Array, b: Array, carry: Array | bool = False) -> tuple[Array, Array]:
    first = a + b
    total = first + np.asarray(carry).astype(a.dtype)
    return total, (_unsigned(first) < _unsigned(a)) | (_unsigned(total) < _unsigned(first))


def with_borrow(a: Array, b: Array, borrow: Array | bool = False) -> tuple[Array, Array]:
    first = a - b
    rest = first - np.asarray(borrow).astype(a.dtype)
    return rest, (_unsigned(a) < _unsigned(b)) | (_unsigned(first) < _unsigned(rest))


def _unsigned(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


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


def inserted(a: Array, b: Array, place: Array, size: Array) -> Array:
    """``b`` with the lowest bits of ``a`` from a place on."""
    width, ones = 8 * a.itemsize, np.full(1, -1, f"i{a.itemsize}").view(a.dtype)
    size = np.minimum(size & 0xFF, width)
    mask = shifted_left(~shifted_left(ones, size), place & 0xFF)
    return (shifted_left(a, place & 0xFF) & mask) | (b & ~mask)


# ---- conversions --------------------------------------------------------------------------------


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


# ---- comparisons --------------------------------------------------------------------------------

COMPARISONS: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def ordered_unequal(a: Array, b: Array) -> Array:
    """What ``ne`` means for floats; NumPy's is true for NaN."""
    return (a != b) & ~unordered(a, b)


def or_unordered(compare: Callable) -> Callable:
    return lambda a, b: compare(a, b) | unordered(a, b)


def comparisons(kind: str) -> dict[str, Callable]:
    """Those of a type, by the name in ``setp``."""
    if kind in BITS:
        return {name: COMPARISONS[name] for name in ("eq", "ne")}
    if kind[0] == "s":
        return COMPARISONS
    if kind[0] == "u":
        also = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
        return COMPARISONS | {name: COMPARISONS[other] for name, other in also.items()}
    return {
        **COMPARISONS, "ne": ordered_unequal, "nan": unordered,
        "num": lambda a, b: ~unordered(a, b),
        **{f"{name}u": or_unordered(compare) for name, compare in COMPARISONS.items()},
    }  # fmt: skip


def least(pick: Callable, propagate: str) -> Callable:
    """min or max of floats: the number if the other one is NaN, and -0.0 is below 0.0."""

    def run(a: Array, b: Array) -> Array:
        equal = np.signbit(a) if pick is np.fmin else ~np.signbit(a)
        found = np.where(a == b, np.where(equal, a, b), pick(a, b))
        return np.where(unordered(a, b), a.dtype.type(np.nan), found) if propagate else found

    return run


# ---- the table ----------------------------------------------------------------------------------

TABLE: dict[str, Operation] = {}


def add(name: str, kinds: Sequence[str], function: Callable, *, results: int = 1) -> None:
    """Adds an instruction; ``kinds`` are the types of its results and then of its sources."""
    TABLE[name] = Operation(tuple(kinds[:results]), tuple(kinds[results:]), function)


def _integers(kind: str) -> None:
    same = [kind] * 3
    for name, function in {
        "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "mul.hi": high, "div": divided,
        "rem": remainder, "min": np.minimum, "max": np.maximum,
    }.items():  # fmt: skip
        add(f"{name}.{kind}", same, function)
    add(f"mad.lo.{kind}", [kind] * 4, lambda a, b, c: a * b + c)
    add(f"mad.hi.{kind}", [kind] * 4, lambda a, b, c: high(a, b) + c)
    if kind[0] == "s":
        add(f"neg.{kind}", [kind] * 2, np.negative)
        add(f"abs.{kind}", [kind] * 2, np.abs)
    bits = bits_of(kind)
    if bits < 64:
        wide, to = f"{kind[0]}{2 * bits}", TYPES[f"{kind[0]}{2 * bits}"]
        add(f"mul.wide.{kind}", [wide, kind, kind], lambda a, b: a.astype(to) * b.astype(to))
        add(f"mad.wide.{kind}", [wide, kind, kind, wide],
            lambda a, b, c: a.astype(to) * b.astype(to) + c)  # fmt: skip
    if bits > 16:
        add(f"bfe.{kind}", [kind, kind, "u32", "u32"], extracted)
        for name, carried in (("add", with_carry), ("sub", with_borrow)):
            add(f"{name}.cc.{kind}", [kind, CARRY, kind, kind], carried, results=2)
            add(f"{name}c.cc.{kind}", [kind, CARRY, kind, kind, CARRY], carried, results=2)
            add(f"{name}c.{kind}", [kind, kind, kind, CARRY],
                lambda a, b, carry, carried=carried: carried(a, b, carry)[0])  # fmt: skip


def _bits(kind: str) -> None:
    for name, function in {
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }.items():  # fmt: skip
        add(f"{name}.{kind}", [kind] * 3, function)
    add(f"not.{kind}", [kind] * 2, np.invert)
    if kind != "pred":
        if kind != "b16":
            add(f"bfi.{kind}", [kind, kind, kind, "u32", "u32"], inserted)
        add(f"shl.{kind}", [kind, kind, "u32"], shifted_left)
        for sign in "bus":
            shifted = f"{sign}{kind[1:]}"
            add(f"shr.{shifted}", [shifted, shifted, "u32"], shifted_right)


def _floats(kind: str) -> None:
    arithmetic = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
        "div": (2, np.divide), "sqrt": (1, np.sqrt), "rcp": (1, np.reciprocal), "fma": (3, fma),
    }  # fmt: skip
    for (name, (count, function)), mode in product(arithmetic.items(), _MODES):
        kinds = [kind] * (1 + count)
        add(f"{name}.{mode}.{kind}", kinds, floating(function, mode))
    for name, pick in (("min", np.fmin), ("max", np.fmax)):
        for nan in ("", ".NaN"):
            add(f"{name}{nan}.{kind}", [kind] * 3, floating(least(pick, nan)))
    add(f"neg.{kind}", [kind] * 2, np.negative)
    add(f"abs.{kind}", [kind] * 2, np.abs)


def _comparisons(kind: str) -> None:
    """``setp``; with ``.and``, ``.or`` or ``.xor`` also of a predicate."""
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    for name, compare in comparisons(kind).items():
        add(f"setp.{name}.{kind}", ["pred", kind, kind], compare)
        for join, function in joins.items():

            def joined(
                a: Array, b: Array, c: Array, compare: Callable = compare,
                function: Callable = function,
            ) -> Array:  # fmt: skip
                return function(compare(a, b), c)

            add(f"setp.{name}.{join}.{kind}", ["pred", kind, kind, "pred"], joined)


def _conversions() -> None:
    integers = (*INTEGERS, "u8", "s8")
    for to, of in product(integers, integers):
        add(f"cvt.{to}.{of}", [to, of], converted(to))
    for (to, of), mode in product(product(FLOATS, integers), _MODES):
        add(f"cvt.{mode}.{to}.{of}", [to, of], floating(converted(to), mode))
    for to, of in (("f32", "f16"), ("f64", "f32"), ("f64", "f16")):
        add(f"cvt.{to}.{of}", [to, of], floating(converted(to)))
    for mode in _MODES:
        add(f"cvt.{mode}.f32.f64", ["f32", "f64"], floating(converted("f32"), mode))
    for mode in ("rn", "rz"):
        add(f"cvt.{mode}.f16.f32", ["f16", "f32"], floating(converted("f16", mode)))


for _kind in INTEGERS:
    _integers(_kind)
for _kind in (*BITS, "pred"):
    _bits(_kind)
for _kind in FLOATS:
    _floats(_kind)
for _kind in (*INTEGERS, *BITS, *FLOATS):
    _comparisons(_kind)
for _kind in (*INTEGERS, *BITS, *FLOATS):
    add(f"selp.{_kind}", [_kind, _kind, _kind, "pred"], lambda a, b, c: np.where(c, a, b))
for _kind in (*INTEGERS, *BITS, *FLOATS, "pred"):
    add(f"mov.{_kind}", [_kind] * 2, lambda a: a)
add("prmt.b32", ["b32", "b32", "b32", "u32"], permuted)
_conversions()
