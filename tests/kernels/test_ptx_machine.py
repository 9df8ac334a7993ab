"""What runs PTX refuses all that no kernel may do."""

import numpy as np
import pytest
from kernels.ptx.machine import Machine, Memory, PtxError
from kernels.ptx.text import parsed

pytestmark = pytest.mark.host

START = """
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""


def run(body: str) -> None:
    """Runs a body by four lanes on a buffer of 64 bytes.

    %rd1 is the address of the buffer, %r1 the lane's number, and %rd3 the address of its word.
    """
    memory = Memory()
    address = memory.add(np.zeros(64, np.uint8), writes=True)
    entry = parsed(".param .u64 p", START + body + "ret;")
    Machine(entry).run(memory, [np.array([address]).view(np.uint8)], 1, 4, most=1000)


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
    "another thread reads": ["ld.u32 %r2, [%rd1+12]; st.u32 [%rd3], %r2;"],
    "zero": ["div.s32 %r2, 1, %r1;"],
    "does not end": ["$L: bra $L;"],
}  # fmt: skip


def test_what_no_kernel_may_do_is_an_error():
    for why, bodies in REFUSED.items():
        for body in bodies:
            with pytest.raises((PtxError, ValueError), match=why):
                run(body)
