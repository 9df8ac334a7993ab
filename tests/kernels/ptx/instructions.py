"""What each PTX instruction computes: a table from its full name to an expression of C++.

It has what NVRTC makes of the kernels, and what mutants make of that. A name that is not in the
table is unknown. A float instruction without a rounding, such as ``add.f32``, is not in it: ptxas
may fuse it with another one.

Source: NVIDIA's PTX ISA 9.0, "Instruction Set".
"""

from itertools import product
from typing import NamedTuple

C_TYPES = {"f16": "_Float16", "f32": "float", "f64": "double", "pred": "bool"}
C_TYPES |= {f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t"
            for kind in "usb" for bits in (8, 16, 32, 64)}  # fmt: skip
INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
BITS, FLOATS = ("b16", "b32", "b64"), ("f32", "f64")
MODES = ("rn", "rz")  # of rounding: to nearest, towards zero
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Functions of the expressions. Arithmetic of float32 makes one NaN; those of float64 are kept.
FUNCTIONS = """
typedef __int128 ws; typedef unsigned __int128 wu;
template <typename T> bool unordered(T a, T b) { return a != a || b != b; }
template <typename T> T quotient(T a, T b) {
    if (b == 0) throw "a division by zero";
    return ws(a) / b;
}
inline float root(float a) { return __builtin_sqrtf(a); }
inline double root(double a) { return __builtin_sqrt(a); }
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double canonical(double a) { return a; }
inline float canonical(float a) { return a == a ? a : from<float>(0x7fffffff); }
// So many bits from a place on; above them copies of the last one if the number is signed.
template <typename T> T extracted(T a, uint32_t b, uint32_t c) {
    const int msb = 8 * sizeof(T) - 1, place = b & 255, size = c & 255;
    const int last = place + size - 1 < msb ? place + size - 1 : msb;
    const bool sign = T(-1) < T(0) && size && (a >> last & 1);
    T found = 0;
    for (int k = 0; k <= msb; ++k)
        found |= T(k < size && place + k <= msb ? a >> (place + k) & 1 : sign) << k;
    return found;
}
// b with so many of the lowest bits of a from a place on.
template <typename T> T inserted(T a, T b, uint32_t c, uint32_t d) {
    const int msb = 8 * sizeof(T) - 1, place = c & 255, size = d & 255;
    for (int k = 0; k < size && place + k <= msb; ++k) {
        const T bit = T(1) << (place + k);
        b = a >> k & 1 ? b | bit : b & ~bit;
    }
    return b;
}
// Any four of the eight bytes of a and b; bit 3 of a choice copies the byte's sign.
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t c) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t found = 0;
    for (int k = 0; k < 32; k += 8, c >>= 4) {
        uint8_t byte = both >> 8 * (c & 7);
        if (c & 8) byte = byte & 0x80 ? 0xff : 0;
        found |= uint32_t(byte) << k;
    }
    return found;
}
"""


class Operation(NamedTuple):
    """What an instruction computes."""

    result: str  # the type of what it writes
    sources: tuple[str, ...]  # types of what it reads
    text: str  # of C++, with its sources as a, b, c and d


TABLE: dict[str, Operation] = {}


def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def add(name: str, kinds: str, text: str) -> None:
    """Adds an instruction; ``kinds`` are the types of its result and then of its sources."""
    result, *sources = kinds.split()
    TABLE[name] = Operation(result, tuple(sources), text)


def _integers(kind: str) -> None:
    bits, wide = bits_of(kind), f"w{kind[0]}"
    for name, text in {
        "add": f"{wide}(a) + b", "sub": f"{wide}(a) - b", "mul.lo": f"{wide}(a) * b",
        "mul.hi": f"{wide}(a) * b >> {bits}", "div": "quotient(a, b)",
        "min": "a < b ? a : b", "max": "a > b ? a : b",
    }.items():  # fmt: skip
        add(f"{name}.{kind}", f"{kind} {kind} {kind}", text)
    add(f"mad.lo.{kind}", f"{kind} {kind} {kind} {kind}", f"{wide}(a) * b + c")
    add(f"neg.{kind}", f"{kind} {kind}", f"-{wide}(a)")
    add(f"shr.{kind}", f"{kind} {kind} u32", f"{wide}(a) >> (b < {bits} ? b : {bits})")
    add(f"bfe.{kind}", f"{kind} {kind} u32 u32", "extracted(a, b, c)")
    if bits < 64:
        add(f"mul.wide.{kind}", f"{kind[0]}{2 * bits} {kind} {kind}", f"{wide}(a) * b")


def _floats(kind: str) -> None:
    arithmetic = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "rcp": "1 / a",
                  "sqrt": "root(a)", "fma": "fused(a, b, c)"}  # fmt: skip
    for (name, text), mode in product(arithmetic.items(), MODES):
        count = 1 + max("abc".index(letter) for letter in "abc" if letter in text.split("(")[-1])
        add(f"{name}.{mode}.{kind}", f"{kind} " * (1 + count), f"canonical({text})")
    add(f"neg.{kind}", f"{kind} {kind}", "-a")
    add(f"abs.{kind}", f"{kind} {kind}", "a < 0 ? -a : a == 0 ? 0 : a")


def _conversions() -> None:
    integers = (*INTEGERS, "u8", "s8")
    for to, of in (*product(integers, integers), ("f32", "f16"), ("f64", "f32")):
        add(f"cvt.{to}.{of}", f"{to} {of}", "canonical(float(a))" if to == "f32" else "a")
    pairs = [*product(FLOATS, integers), ("f32", "f64"), ("f16", "f32")]
    for (to, of), mode in product(pairs, MODES):
        add(f"cvt.{mode}.{to}.{of}", f"{to} {of}", "canonical(float(a))" if to == "f32" else "a")
    add("cvt.rzi.s64.f64", "s64 f64", "int64_t(a)")  # of a number that fits


for _kind in INTEGERS:
    _integers(_kind)
for _kind in (*BITS, "pred"):
    add(f"and.{_kind}", f"{_kind} {_kind} {_kind}", "a & b")
    add(f"or.{_kind}", f"{_kind} {_kind} {_kind}", "a | b")
    add(f"not.{_kind}", f"{_kind} {_kind}", "!a" if _kind == "pred" else "~a")
add("xor.pred", "pred pred pred", "a != b")
add("xor.b32", "b32 b32 b32", "a ^ b")
for _kind in BITS[1:]:
    add(f"bfi.{_kind}", f"{_kind} {_kind} {_kind} u32 u32", "inserted(a, b, c, d)")
add("clz.b64", "u32 b64", "a ? __builtin_clzll(a) : 64")
for _kind in BITS:
    add(f"shl.{_kind}", f"{_kind} {_kind} u32", f"wu(a) << (b < {_kind[1:]} ? b : {_kind[1:]})")
for _kind in FLOATS:
    _floats(_kind)
for _kind in (*INTEGERS, *BITS, *FLOATS):
    for _name, _sign in COMPARISONS.items():
        # ``ne`` of floats is false for NaN.
        add(f"setp.{_name}.{_kind}", f"pred {_kind} {_kind}", f"!unordered(a, b) && a {_sign} b")
    add(f"setp.neu.{_kind}", f"pred {_kind} {_kind}", "a != b")
    add(f"setp.equ.{_kind}", f"pred {_kind} {_kind}", "unordered(a, b) || a == b")
    if _kind in FLOATS:
        add(f"setp.nan.{_kind}", f"pred {_kind} {_kind}", "unordered(a, b)")
        add(f"setp.num.{_kind}", f"pred {_kind} {_kind}", "!unordered(a, b)")
    for _name, _sign in COMPARISONS.items() if _kind in FLOATS else ():
        if _name not in ("eq", "ne"):
            add(
                f"setp.{_name}u.{_kind}", f"pred {_kind} {_kind}", f"unordered(a, b) || a {_sign} b"
            )
    add(f"selp.{_kind}", f"{_kind} {_kind} {_kind} pred", "c ? a : b")
for _kind in (*INTEGERS, *BITS, *FLOATS, "pred"):
    add(f"mov.{_kind}", f"{_kind} {_kind}", "a")
add("prmt.b32", "b32 b32 b32 u32", "permuted(a, b, c)")
_conversions()
