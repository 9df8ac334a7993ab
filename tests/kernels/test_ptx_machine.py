"""The interpreter of PTX: what it computes, against g++, and what it refuses."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product

import numpy as np
import pytest
from kernels.ptx.instructions import CARRY, TABLE, TYPES
from kernels.ptx.machine import Machine, Memory, PtxError
from kernels.ptx.text import parsed
from support.exact_data import same

C_TYPES = {"f16": "_Float16", "f32": "float", "f64": "double", "pred": "bool"}
C_TYPES |= {f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t"
            for kind in "usb" for bits in (8, 16, 32, 64)}  # fmt: skip
MODES = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
HEADER = """
#include <cfenv>
#include <cmath>
#include <cstdint>
typedef __int128 ws; typedef unsigned __int128 wu;
template <typename T> static bool U(T a, T b) { return a != a || b != b; }
template <typename T> static T MIN(T a, T b, bool nan) {
    if (U(a, b)) return nan ? T(NAN) : a != a ? b : a;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <typename T> static T MAX(T a, T b, bool nan) { return -MIN<T>(-a, -b, nan); }
template <typename T> static T BFE(T a, uint32_t b, uint32_t c, int msb) {
    const int place = b & 255, size = c & 255;
    const int last = place + size - 1 < msb ? place + size - 1 : msb;
    const bool sign = T(-1) < T(0) && size && (a >> last & 1);
    T found = 0;
    for (int k = 0; k <= msb; ++k)
        found |= T(k < size && place + k <= msb ? a >> (place + k) & 1 : sign) << k;
    return found;
}
template <typename T> static T BFI(T a, T b, uint32_t c, uint32_t d, int msb) {
    for (int k = 0; k < int(d & 255) && int(c & 255) + k <= msb; ++k) {
        const T bit = T(1) << ((c & 255) + k);
        b = a >> k & 1 ? b | bit : b & ~bit;
    }
    return b;
}
static uint32_t PRMT(uint32_t a, uint32_t b, uint32_t c) {
    uint64_t both = uint64_t(b) << 32 | a; uint32_t found = 0;
    for (int k = 0; k < 32; k += 8, c >>= 4) {
        uint8_t byte = both >> 8 * (c & 7);
        if (c & 8) byte = byte & 0x80 ? 0xff : 0;
        found |= uint32_t(byte) << k;
    }
    return found;
}
"""
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def of_integers() -> dict[str, str]:
    found = {"prmt.b32": "PRMT(a, b, c)"}
    for kind, bits in product("us", (16, 32, 64)):
        t, w = f"{kind}{bits}", f"w{kind}"
        high = f"({w}(a) * b >> {bits})"
        found |= {
            f"add.{t}": f"{w}(a) + b", f"sub.{t}": f"{w}(a) - b", f"mul.lo.{t}": f"{w}(a) * b",
            f"mul.hi.{t}": high, f"mad.lo.{t}": f"{w}(a) * b + c", f"mad.hi.{t}": f"{high} + c",
            f"div.{t}": f"{w}(a) / b", f"rem.{t}": f"{w}(a) % b", f"min.{t}": "a < b ? a : b",
            f"max.{t}": "a > b ? a : b", f"shr.{t}": f"{w}(a) >> (b < {bits} ? b : {bits})",
            f"selp.{t}": "c ? a : b", f"neg.{t}": f"-{w}(a)", f"abs.{t}": f"a < 0 ? -{w}(a) : a",
            f"bfe.{t}": f"BFE(a, b, c, {bits - 1})", f"mul.wide.{t}": f"{w}(a) * b",
            f"mad.wide.{t}": f"{w}(a) * b + c",
        }  # fmt: skip
        for name, sign in (("add", "+"), ("sub", "-")):
            total = f"wu(uint{bits}_t(a)) {sign} uint{bits}_t(b)"
            found[f"{name}.cc.{t}"] = total
            found[f"{name}c.cc.{t}"] = found[f"{name}c.{t}"] = f"{total} {sign} c"
        for name, sign in COMPARISONS.items():
            found[f"setp.{name}.{t}"] = f"a {sign} b"
            found[f"setp.{name}.xor.{t}"] = f"(a {sign} b) != c"
    for name, sign in (("lo", "<"), ("ls", "<="), ("hi", ">"), ("hs", ">=")):
        found |= {f"setp.{name}.u{bits}": f"a {sign} b" for bits in (16, 32, 64)}
    for bits in (16, 32, 64):
        t, count = f"b{bits}", f"(b < {bits} ? b : {bits})"
        found |= {
            f"and.{t}": "a & b", f"or.{t}": "a | b", f"xor.{t}": "a ^ b", f"not.{t}": "~a",
            f"shl.{t}": f"wu(a) << {count}", f"shr.{t}": f"wu(a) >> {count}",
            f"setp.ne.and.{t}": "a != b && c", f"bfi.{t}": f"BFI(a, b, c, d, {bits - 1})",
        }  # fmt: skip
    return found


def of_floats() -> dict[str, str]:
    found = {}
    arithmetic = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "rcp": "1 / a",
                  "sqrt": "std::sqrt(a)", "fma": "std::fma(a, b, c)"}  # fmt: skip
    for t in ("f32", "f64"):
        for (name, text), mode in product(arithmetic.items(), MODES):
            found[f"{name}.{mode}.{t}"] = text
        for name, nan in product(("min", "max"), ("", ".NaN")):
            found[f"{name}{nan}.{t}"] = f"{name.upper()}(a, b, {int(bool(nan))})"
        found |= {f"neg.{t}": "-a", f"abs.{t}": "std::fabs(a)"}
        for name, sign in COMPARISONS.items():
            found[f"setp.{name}.{t}"] = f"!U(a, b) && a {sign} b"
            found[f"setp.{name}u.{t}"] = f"U(a, b) || a {sign} b"
        found[f"setp.nan.{t}"] = "U(a, b)"
        found[f"setp.num.or.{t}"] = "!U(a, b) || c"
    return found


def of_conversions() -> dict[str, str]:
    return {name: "a" for name in TABLE if name.startswith("cvt")}


# Instruction -> the same in C++, of its sources a, b and c.
EXPRESSIONS = of_integers() | of_floats() | of_conversions()
EXPRESSIONS = {name: text for name, text in EXPRESSIONS.items() if name in TABLE}


def numbers(kind: str, seed: int) -> np.ndarray:
    """Random bits, and all pairs of edge values if the seed is 0 for one and 1 for the other."""
    dtype, rng = TYPES[kind], np.random.default_rng(seed)
    if kind in ("pred", CARRY):
        return rng.integers(0, 2, 2500).astype(bool)
    bits = np.dtype(f"u{dtype.itemsize}")
    made = rng.integers(0, np.iinfo(bits).max, 2500, bits, endpoint=True).view(dtype)
    if dtype.kind == "f":
        info = np.finfo(dtype)
        edges = [0, 1, 1.5, 3, info.max, info.tiny, info.smallest_subnormal, info.tiny * 1.5,
                 info.eps, 1 + info.eps, 2**-14, 65520, 65504, np.inf, np.nan]  # fmt: skip
        with np.errstate(all="ignore"):
            edges = np.array([sign * edge for edge in edges for sign in (1, -1)]).astype(dtype)
        made[1000:1500] = rng.standard_normal(500).astype(dtype)
    else:
        width = 8 * dtype.itemsize
        top = 1 << width - 1
        edges = [0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, top - 1, top, top + 1, -2, -1]
        edges = np.array([edge % 2**width for edge in edges], bits).view(dtype)
    count = len(edges)
    pairs = np.repeat(edges, count) if seed % 2 else np.tile(edges, count)
    made[: count * count] = pairs
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """A function for each of ``EXPRESSIONS``: run_k(a, b, c, d, results)."""
    folder = tmp_path_factory.mktemp("arithmetic")
    parts = [HEADER]
    for number, (name, text) in enumerate(EXPRESSIONS.items()):
        results, sources, _ = TABLE[name]
        mode = next((MODES[part] for part in name.split(".") if part in MODES), MODES["rn"])
        types = [C_TYPES["pred" if kind == CARRY else kind] for kind in sources]
        reads = "".join(f"{kind} {place} = (({kind}*){place}s)[k]; "
                        for kind, place in zip(types, "abcd", strict=False))  # fmt: skip
        to = C_TYPES[results[0]]
        carry = f"((bool*)f)[k] = wu({text}) >> {TYPES[sources[0]].itemsize * 8} & 1;" * len(
            results[1:]
        )
        parts.append(
            f'extern "C" void run_{number}(void* as, void* bs, void* cs, void* ds, '
            "void* e, void* f, long n) "
            f"{{ fesetround({mode}); for (long k = 0; k < n; ++k) "
            f"{{ {reads} (({to}*)e)[k] = ({to})({text}); {carry} }} fesetround(FE_TONEAREST); }}\n"
        )
    (folder / "text.cpp").write_text("".join(parts))
    flags = "-O1 -std=c++17 -shared -fPIC -ffp-contract=off -frounding-math -fwrapv -w".split()
    done = subprocess.run(["g++", *flags, "-o", "a.so", "text.cpp"], cwd=folder, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "a.so"))


@pytest.mark.host
def test_each_instruction_computes_what_the_host_computes(library):
    wrong = []
    for number, name in enumerate(EXPRESSIONS):
        results, sources, function = TABLE[name]
        kinds = ["pred" if kind == CARRY else kind for kind in sources]
        given = [numbers(kind, seed) for seed, kind in enumerate(kinds)]
        if name.startswith(("div", "rem")) and name.split(".")[-1][0] in "us":
            given[1][given[1] == 0] = 1
        if name.startswith("sh"):
            given[1] %= 80
        if name.startswith("bf"):  # a place and a number of bits
            given[-2:] = given[-2] % 80, given[-1] % 80
        wanted = [np.zeros(2500, TYPES["pred" if kind == CARRY else kind]) for kind in results]
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in given] + [None] * (4 - len(given))
        pointers += [ctypes.c_void_p(each.ctypes.data) for each in (wanted * 2)[:2]]
        getattr(library, f"run_{number}")(*pointers, ctypes.c_long(2500))
        with np.errstate(all="ignore"):
            found = function(*given)
            found = found if len(results) > 1 else (found,)
            if not all(
                map(lambda left, right: same(left.astype(right.dtype), right), found, wanted)
            ):
                wrong.append(name)
    assert wrong == []


@pytest.mark.host
def test_every_instruction_but_moves_is_compared():
    apart = {name for name in TABLE if name.split(".")[0] in ("mov", "selp", "setp")}
    logical = {name for name in TABLE if name.endswith("pred")}
    assert TABLE.keys() - EXPRESSIONS.keys() - apart - logical == set()


# ---- the machine --------------------------------------------------------------------------------

START = """
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""


def run(body: str) -> np.ndarray:
    """Runs a body by four lanes; returns a buffer of 64 bytes.

    %rd1 is the address of the buffer, %r1 the lane's number, and %rd3 the address of its word.
    """
    memory = Memory()
    address = memory.add(np.zeros(64, np.uint8), writes=True)
    entry = parsed(".param .u64 p", START + body + "ret;")
    Machine(entry, memory, [np.array([address]).view(np.uint8)], 1, 4).run(1000)
    return memory.content(address).view(np.uint32)


def test_lanes_take_their_own_branches_and_meet_again():
    found = run("""
        mov.u32 %r2, 0;
        mov.u32 %r3, 0;
        $L: add.s32 %r2, %r2, 10;  // once more than the lane's number says
        setp.lt.u32 %p1, %r3, %r1;
        add.s32 %r3, %r3, 1;
        @%p1 bra $L;
        add.s32 %r2, %r2, 1;
        st.global.u32 [%rd3], %r2;
    """)
    assert found[:4].tolist() == [11, 21, 31, 41]


def test_local_memory_belongs_to_a_lane():
    found = run("""
        .local .align 4 .b8 depot[8];
        mov.b64 %rd4, depot; cvta.local.u64 %rd5, %rd4;
        st.local.u32 [%rd4+4], %r1; ld.u32 %r2, [%rd5+4];
        st.u32 [%rd3], %r2;
    """)
    assert found[:4].tolist() == [0, 1, 2, 3]


def test_a_scope_has_its_own_registers_and_parts_are_packed():
    found = run("""
        mov.b32 {%rs1, %rs2}, 131073; mov.b32 %r2, {%rs2, %rs1};
        {.reg .pred p; setp.ne.s32 p, %r1, 0; @!p mov.u32 %r2, 7;}
        {.reg .b32 p; mov.u32 p, 5; add.s32 %r2, %r2, p;}
        st.u32 [%rd3], %r2;
    """)
    assert found[:4].tolist() == [12, 65543, 65543, 65543]


def test_a_value_that_was_not_loaded_may_be_left_unused():
    found = run("""
        setp.ne.s32 %p1, %r1, 0; @%p1 ld.u32 %r2, [%rd3]; add.s32 %r2, %r2, 7;
        selp.b32 %r3, %r2, 5, %p1; st.u32 [%rd3], %r3;
    """)
    assert found[:4].tolist() == [5, 7, 7, 7]


def test_bits_that_were_not_written_may_be_masked_and_dropped():
    found = run("""
        and.b32 %r3, %r2, -65536; and.b32 %r3, %r3, 65535; st.u32 [%rd3], %r3;
        mov.b64 %rd4, {%r1, %r2}; mov.b64 {%r4, _}, %rd4; st.u32 [%rd3+16], %r4;
    """)
    assert found[:8].tolist() == [0] * 4 + [0, 1, 2, 3]


def test_wider_registers_are_filled_and_cut():
    found = run("""
        mov.u32 %r2, 0x1ff80; st.u8 [%rd3], %r2; ld.s8 %r3, [%rd3]; ld.u8 %r4, [%rd3];
        cvt.s16.s8 %rs1, %r2; cvt.u32.u16 %r5, %rs1;
        add.s32 %r3, %r3, %r4; add.s32 %r3, %r3, %r5; st.u32 [%rd3], %r3;
    """)
    assert found[:4].tolist() == [0xFF80] * 4  # -128 + 128 + 0xff80


REFUSED = {
    "unknown": ["foo.u32 %r2, %r1;", "add.f32 %f1, %f2, %f3;", "add.sat.s32 %r2, %r1, 1;",
                "ld.shared.u32 %r2, [%rd3];", "bar.sync 0;", "atom.add.u32 %r2, [%rd3], 1;",
                "add.s64 %rd4, %r1, 1;", "ld.global.v3.u32 {%r2, %r3, %r4}, [%rd1];",
                "call foo;", "mov.u32 %r2, %laneid;", "mov.f32 %f1, 0d3FF0000000000000;"],
    "unknown declaration": [".shared .align 4 .b8 x[4];"],
    "not written": ["add.s32 %r2, %r3, 1;", "and.b32 %r2, %r3, %r1;", "or.b32 %r2, %r3, 0;",
                    "setp.eq.s32 %p1, %r1, 0; @%p1 mov.u32 %r2, 1; st.u32 [%rd3], %r2;",
                    ".local .align 4 .b8 d[4]; mov.b64 %rd4, d; ld.local.u32 %r2, [%rd4];"],
    "bits that were not written": [
        "and.b32 %r3, %r2, 65535; st.u32 [%rd3], %r3;",
        "mov.b64 %rd4, {%r1, %r2}; mov.b64 {_, %r4}, %rd4; st.u32 [%rd3], %r4;",
        *(f"setp.eq.s32 %p1, %r1, 0; @%p1 ld.u64 %rd4, [%rd1]; add.s64 %rd4, %rd4, 1; {use}"
          for use in ("st.u32 [%rd3], %rd4;", "ld.u32 %r2, [%rd4];",
                      "setp.eq.s64 %p2, %rd4, 0; @%p2 bra $L; $L:")),
    ],
    "outside": ["ld.u32 %r2, [%rd1+64];", "ld.u32 %r2, [%rd1+-4];", "st.u64 [%rd3+60], %rd1;",
                "cvt.u32.u64 %r2, %rd1; cvt.u64.u32 %rd4, %r2; "
                "ld.u32 %r3, [%rd4];"],
    "aligned": ["ld.u32 %r2, [%rd1+2];", "ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+8];"],
    "only read": ["mov.b64 %rd4, p; cvta.param.u64 %rd5, %rd4; st.u64 [%rd5], %rd1;"],
    "another space": ["ld.param.u64 %rd4, [%rd1];", "ld.global.u32 %r2, [p];"],
    "another thread writes": ["st.u32 [%rd1], %r1;", "st.u32 [%rd3], %r1; ld.u32 %r2, [%rd1];"],
    "another thread reads": ["ld.u32 %r2, [%rd1]; st.u32 [%rd3], %r2;"],
    "zero": ["div.s32 %r2, 1, %r1;"],
    "does not end": ["$L: bra $L;"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("why", "body"), [(why, body) for why, bodies in REFUSED.items() for body in bodies]
)
@pytest.mark.whole_product
def test_what_no_kernel_may_do_is_an_error(why, body):
    with pytest.raises((PtxError, ValueError), match=why):
        run(body)
