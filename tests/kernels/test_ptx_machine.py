"""The interpreter of PTX: what it computes, against g++, and what it refuses."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product

import numpy as np
import pytest
from kernels.ptx.instructions import BITS, FLOATS, INTEGERS, MODES, TABLE, TYPES
from kernels.ptx.machine import Machine, Memory, PtxError
from kernels.ptx.text import parsed
from support.exact_data import same

C_TYPES = {"f16": "_Float16", "f32": "float", "f64": "double", "pred": "bool"}
C_TYPES |= {f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t"
            for kind in "usb" for bits in (8, 16, 32, 64)}  # fmt: skip
HEADER = """
#include <cfenv>
#include <cmath>
#include <cstdint>
typedef __int128 ws; typedef unsigned __int128 wu;
template <typename T> static bool U(T a, T b) { return a != a || b != b; }
template <typename T> static T BFE(T a, uint32_t b, uint32_t c) {
    const int msb = 8 * sizeof(T) - 1, place = b & 255, size = c & 255;
    const int last = place + size - 1 < msb ? place + size - 1 : msb;
    const bool sign = T(-1) < T(0) && size && (a >> last & 1);
    T found = 0;
    for (int k = 0; k <= msb; ++k)
        found |= T(k < size && place + k <= msb ? a >> (place + k) & 1 : sign) << k;
    return found;
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
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def expressions() -> dict[str, str]:
    """Instruction -> the same in C++, of its sources a, b and c."""
    found = {name: "a" for name in TABLE if name.startswith(("cvt", "mov"))}
    found |= {"prmt.b32": "PRMT(a, b, c)", "not.pred": "!a"}
    found |= {"and.pred": "a && b", "or.pred": "a || b"}
    for kind, bits in product("us", (16, 32, 64)):
        t, w = f"{kind}{bits}", f"w{kind}"
        found |= {
            f"add.{t}": f"{w}(a) + b", f"sub.{t}": f"{w}(a) - b", f"mul.lo.{t}": f"{w}(a) * b",
            f"mul.hi.{t}": f"{w}(a) * b >> {bits}", f"mad.lo.{t}": f"{w}(a) * b + c",
            f"div.{t}": f"{w}(a) / b", f"min.{t}": "a < b ? a : b", f"max.{t}": "a > b ? a : b",
            f"shr.{t}": f"{w}(a) >> (b < {bits} ? b : {bits})", f"neg.{t}": f"-{w}(a)",
            f"bfe.{t}": "BFE(a, b, c)", f"mul.wide.{t}": f"{w}(a) * b",
        }  # fmt: skip
    for t, bits in (("b16", 16), ("b32", 32), ("b64", 64)):
        found |= {
            f"and.{t}": "a & b", f"or.{t}": "a | b", f"not.{t}": "~a",
            f"shl.{t}": f"wu(a) << (b < {bits} ? b : {bits})",
        }  # fmt: skip
    arithmetic = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b", "rcp": "1 / a",
                  "sqrt": "std::sqrt(a)", "fma": "std::fma(a, b, c)"}  # fmt: skip
    for t in FLOATS:
        found |= {f"{name}.{mode}.{t}": arithmetic[name] for name in arithmetic for mode in MODES}
        found[f"neg.{t}"] = "-a"
    for t in (*INTEGERS, *BITS, *FLOATS):
        found[f"selp.{t}"] = "c ? a : b"
        both = "!U(a, b) && " if t in FLOATS else ""
        found |= {f"setp.{name}.{t}": f"{both}a {sign} b" for name, sign in COMPARED.items()}
        found |= {f"setp.neu.{t}": "a != b", f"setp.equ.{t}": "U(a, b) || a == b"}
    return {name: text for name, text in found.items() if name in TABLE}


EXPRESSIONS = expressions()


def numbers(kind: str, seed: int) -> np.ndarray:
    """Random bits, and all pairs of edge values if the seed is 0 for one and 1 for the other."""
    dtype, rng = TYPES[kind], np.random.default_rng(seed)
    if kind == "pred":
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
    """A function for each of ``EXPRESSIONS``: run_k(a, b, c, results)."""
    folder = tmp_path_factory.mktemp("arithmetic")
    parts = [HEADER]
    for number, (name, text) in enumerate(EXPRESSIONS.items()):
        result, sources, _ = TABLE[name]
        mode = "FE_TOWARDZERO" if ".rz." in name else "FE_TONEAREST"
        reads = "".join(f"{C_TYPES[kind]} {place} = (({C_TYPES[kind]}*){place}s)[k]; "
                        for kind, place in zip(sources, "abc", strict=False))  # fmt: skip
        to = C_TYPES[result]
        parts.append(
            f'extern "C" void run_{number}(void* as, void* bs, void* cs, void* e, long n) '
            f"{{ fesetround({mode}); for (long k = 0; k < n; ++k) "
            f"{{ {reads} (({to}*)e)[k] = ({to})({text}); }} fesetround(FE_TONEAREST); }}\n"
        )
    (folder / "text.cpp").write_text("".join(parts))
    flags = "-O1 -std=c++17 -shared -fPIC -ffp-contract=off -frounding-math -fwrapv -w".split()
    done = subprocess.run(["g++", *flags, "-o", "a.so", "text.cpp"], cwd=folder, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "a.so"))


@pytest.mark.host
def test_each_instruction_computes_what_the_host_computes(library):
    assert EXPRESSIONS.keys() == TABLE.keys()
    wrong = []
    for number, name in enumerate(EXPRESSIONS):
        result, sources, function = TABLE[name]
        given = [numbers(kind, seed) for seed, kind in enumerate(sources)]
        if name.startswith("div") and sources[0] not in FLOATS:
            given[1][given[1] == 0] = 1
        if name.startswith("sh"):
            given[1] %= 80
        if name.startswith("bfe"):  # a place and a number of bits
            given[1:] = given[1] % 80, given[2] % 80
        wanted = np.zeros(2500, TYPES[result])
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (*given, wanted)]
        pointers[-1:-1] = [None] * (4 - len(pointers))
        getattr(library, f"run_{number}")(*pointers, ctypes.c_long(2500))
        with np.errstate(all="ignore"):
            if not same(function(*given).astype(wanted.dtype), wanted):
                wrong.append(name)
    assert wrong == []


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


# Bodies -> the first words of the buffer after them.
COMPUTED = {
    # Lanes take their own branches and meet again: once more than the lane's number says.
    """mov.u32 %r2, 0; mov.u32 %r3, 0;
       $L: add.s32 %r2, %r2, 10;  // a comment
       setp.lt.u32 %p1, %r3, %r1; add.s32 %r3, %r3, 1; @%p1 bra $L;
       add.s32 %r2, %r2, 1; st.global.u32 [%rd3], %r2;""": [11, 21, 31, 41],
    # A scope has its own registers; parts are packed.
    """mov.b32 {%rs1, %rs2}, 131073; mov.b32 %r2, {%rs2, %rs1};
       {.reg .pred p; setp.ne.s32 p, %r1, 0; @!p mov.u32 %r2, 7;}
       {.reg .b32 p; mov.u32 p, 5; add.s32 %r2, %r2, p;}
       st.u32 [%rd3], %r2;""": [12, 65543, 65543, 65543],
    # A value that was not loaded may be left unused.
    """setp.ne.s32 %p1, %r1, 0; @%p1 ld.u32 %r2, [%rd3]; add.s32 %r2, %r2, 7;
       selp.b32 %r3, %r2, 5, %p1; st.u32 [%rd3], %r3;""": [5, 7, 7, 7],
    # Bits that were not written may be masked and dropped.
    """and.b32 %r3, %r2, -65536; and.b32 %r3, %r3, 65535; st.u32 [%rd3], %r3;
       mov.b64 %rd4, {%r1, %r2}; mov.b64 {%r4, _}, %rd4; st.u32 [%rd3+16], %r4;""":
        [0] * 4 + [0, 1, 2, 3],
    # Wider registers are filled and cut: -128 + 128 + 0xff80.
    """mov.u32 %r2, 0x1ff80; st.u8 [%rd3], %r2; ld.s8 %r3, [%rd3]; ld.u8 %r4, [%rd3];
       cvt.s16.s8 %rs1, %r2; cvt.u32.u16 %r5, %rs1;
       add.s32 %r3, %r3, %r4; add.s32 %r3, %r3, %r5; st.u32 [%rd3], %r3;""": [0xFF80] * 4,
}  # fmt: skip


def test_a_body_computes():
    for body, words in COMPUTED.items():
        assert run(body)[: len(words)].tolist() == words, body
    assert len({*run("st.u32 [%rd3], %r2;")[:4].tolist()}) == 4, "what nothing wrote is random"


REFUSED = {
    "unknown": ["foo.u32 %r2, %r1;", "add.f32 %f1, %f2, %f3;", "add.sat.s32 %r2, %r1, 1;",
                "ld.shared.u32 %r2, [%rd3];", "bar.sync 0;", "atom.add.u32 %r2, [%rd3], 1;",
                "add.s64 %rd4, %r1, 1;", "ld.global.v3.u32 {%r2, %r3, %r4}, [%rd1];",
                "call foo;", "mov.u32 %r2, %laneid;", "mov.f32 %f1, 0d3FF0000000000000;"],
    "unknown declaration": [".shared .align 4 .b8 x[4];", ".local .align 4 .b8 x[4];"],
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


def test_what_no_kernel_may_do_is_an_error():
    for why, bodies in REFUSED.items():
        for body in bodies:
            with pytest.raises((PtxError, ValueError), match=why):
                run(body)
