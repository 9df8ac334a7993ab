"""Every template of every kernel compiles for every kind of GPU, and its code is as it was meant.

Vectors travel by ``ld.global.v4`` and ``st.global.v4``, spelled out in the text. Everything else
that touches an operand is what the compiler made of plain C++: it knows the addresses from the
table only, so it writes the generic ``ld.f32``. Those must be the tail's alone. That cannot be read
off one listing, so the text is compiled once more with the tail taken out: then no access to an
element may be left but vectors.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from exhaustive import covering
from kernels.nvrtc import architectures, compiled
from updates import layout, rule_of

from gradreduce.device.dtypes import C_TYPES
from gradreduce.device.kernel import kernel_text
from gradreduce.device.table import TABLE
from gradreduce.ops import KERNELS, RuleKernel
from gradreduce.ops._templates import FLOATS
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.nvrtc

# NVRTC 12.9 writes the same PTX up to sm_90, and the same from sm_100 on: 2026-11. So the tier
# compiles all templates for the GPU that the figures are of, and a part of them for every other:
# arch -> the first, and how many further the next one is. A plain run compiles so many of each
# kernel's that every kind of element is among them, for sm_90, and one kernel for every GPU.
SAMPLES = {70: (0, 4), 80: (1, 4), 90: (0, 1), 100: (0, 2), 120: (3, 4)}
FOR_ALL = "momentum"
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ITEMSIZE |= {f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
# Single elements, in the text: every kernel's tail, and the vector that reaches into pack's gap or
# into the next row of segment_sum.
TAILS = {
    "body.template at<1>(i);": 1,
    "for (i64 l = i; l < i + LANES; ++l) at<1>(l);": 0,
    "for (int l = 0; l < LANES && k + l < end; ++l) last(total, l, k);": 0,
}
# Read in another type than written, or once for a whole chunk: their own tests count.
APART = ("square_sum", "clip")
READ_ONE = ("pack", "divide", "take_rows")


def has_a_stand_in(kernel):
    """Of AGN's two forms of a rule that of the largest stands for the others, but on one GPU."""
    return isinstance(kernel, RuleKernel) and kernel.form != "plain" and rule_of(kernel) != "adam"


def few(kernel):
    """Templates in which every dtype occurs, signed or not; one, if it has a stand-in."""
    if has_a_stand_in(kernel):
        return kernel.templates[-1:]
    values = [
        tuple(enumerate(str(part).removeprefix("u") for part in template))
        for template in kernel.templates
    ]
    return tuple(kernel.templates[number] for number in sorted(covering(values, 0, fewest=1)))


def programs_of(*archs):
    """Each kernel for each of these in the tier; in a plain run for sm_90."""
    values = []
    for kernel in KERNELS:
        for arch in archs if kernel.name == FOR_ALL else [90]:
            name = f"{kernel.name}-sm_{arch}-few"
            values.append(pytest.param(kernel, arch, few(kernel), id=name))
        for arch in [90] if has_a_stand_in(kernel) else archs:
            first, step = SAMPLES[arch]
            some, name = kernel.templates[first::step], f"{kernel.name}-sm_{arch}"
            marks = (pytest.mark.exhaustive, pytest.mark.slow)
            values.append(pytest.param(kernel, arch, some, id=name, marks=marks))
    return pytest.mark.parametrize(("kernel", "arch", "templates"), values)


def without_tail(source):
    text = kernel_text(source)
    for tail, at_least in TAILS.items():
        assert at_least <= text.count(tail) <= 1, f"the text has changed: {tail}"
        text = text.replace(tail, ";")
    assert not re.search(r"^[^/]*at<1>", text, re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def programs(request):
    """(fixture, kernel, arch, templates) -> the future of its program.

    What the collected tests need is compiled ahead, on all cores, in processes: NVRTC keeps a
    hundred megabytes.
    """
    wanted = {}
    for item in request.session.items:
        if item.module is request.module and "programs" in item.fixturenames:
            params = item.callspec.params
            chosen = params["kernel"], params["arch"], params["templates"]
            for fixture in {"program", "tailless"} & set(item.fixturenames):
                wanted[fixture, *chosen] = None
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for fixture, kernel, arch, templates in wanted:
            names = [kernel.expression(template) for template in templates]
            whole = fixture == "program"
            text = kernel_text(kernel.source) if whole else without_tail(kernel.source)
            wanted[fixture, kernel, arch, templates] = pool.submit(
                compiled, text, names, arch, ptx_only=not whole
            )
        yield wanted
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def program(programs, kernel, arch, templates):
    return programs["program", kernel, arch, templates].result()


@pytest.fixture
def tailless(programs, kernel, arch, templates):
    return programs["tailless", kernel, arch, templates].result()


def accesses(body):
    """How often each load and store instruction occurs; parameters left out."""
    found = re.findall(r"\b((?:ld|st)(?:\.\w+)*\.(?:[a-z]+\d+|pred))\b", body)
    return Counter(name for name in found if not name.startswith("ld.param"))


def vectors(kernel, template):
    """16-byte vectors of one turn of the vector loop: of each read operand, of each written one."""
    types = [ITEMSIZE[part] for part in template if isinstance(part, str)]
    lanes = 16 // min(types)
    return lanes * types[-1] // 16, lanes * types[0] // 16


def vectors_of_update(kernel, template):
    """16-byte vectors that one turn reads, and that it writes, of all operands together."""
    lanes = 16 // min(ITEMSIZE[part] for part in template)
    operands = [(kind, lanes * ITEMSIZE[dtype] // 16) for kind, dtype in layout(kernel, template)]
    read = sum(n for kind, n in operands if kind != "copy")
    return read, sum(n for _, n in operands[:-1])


def test_this_nvrtc_knows_every_architecture():
    assert SAMPLES.keys() <= architectures()


def test_every_type_has_a_size_here():
    assert ITEMSIZE.keys() == C_TYPES.keys()


def test_messages_point_into_the_shipped_file():
    text = kernel_text("add_n").replace("store(out, i, total);", "store(out, i, total, 5);")
    with pytest.raises(RuntimeError, match=r"kernels/add_n\.cu\(\d+\): error"):
        compiled(text, [ADD_N.expression(("float32", "float32", 2))], 80, ptx_only=True)


@programs_of(*SAMPLES)
def test_nothing_is_spilled(kernel, templates, program):
    stack = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    assert re.findall(stack, program.log) == [("0", "0", "0")] * len(templates)
    assert ".local" not in program.ptx


@programs_of(*SAMPLES)
def test_threads_share_nothing_and_nothing_is_fused(kernel, templates, program):
    assert not re.search(r"\.shared|\bbar\.|\bbarrier\.|\batom\.|\bred\.|\bshfl\.", program.ptx)
    assert not re.search(r"\bfma\.|\bmad\.\S*f\d\d", program.ptx)
    # One without .rn is ptxas's to fuse, which no PTX shows.
    arithmetic = re.findall(r"\b(?:add|sub|mul|div)\.\S*f(?:16|32|64)\b", program.ptx)
    assert {operation.split(".")[1] for operation in arithmetic} <= {"rn"}
    assert re.findall(r"used (\d+) barriers", program.log) == ["0"] * len(templates)


@programs_of(*SAMPLES)
def test_parameters_are_the_table_and_the_declared_scalars(kernel, templates, program):
    kinds = {"int64": "u64", "float64": "f64"}
    table = f"align 8 .b8 [{TABLE.itemsize}]"
    expected = [table, *(kinds[kind] for _, kind in kernel.scalars)]
    for parameters, _ in program.entries.values():
        found = re.findall(r"\.param \.(.*?) ?\w+_param_\d+(\[\d+\])?", parameters)
        assert [" ".join(filter(None, part)) for part in found] == expected


@programs_of(*SAMPLES)
def test_global_accesses_are_16_bytes_wide(kernel, templates, program):
    """But for one word of the table's map."""
    for name, (_, body) in program.entries.items():
        found = {access: n for access, n in accesses(body).items() if ".global" in access}
        assert found.pop("ld.global.u64") == 1, name
        assert set(found) == {"ld.global.v4.u32", "st.global.v4.u32"}, name


@programs_of(*SAMPLES)
def test_every_operand_is_read_and_written_by_vectors(kernel, templates, program):
    """Exactly, where the number of operands is known to the compiler; else at least."""
    for template in templates:
        found = accesses(program.entries[kernel.expression(template)][1])
        loads, stores = found["ld.global.v4.u32"], found["st.global.v4.u32"]
        read, written = vectors(kernel, template)
        if isinstance(kernel, RuleKernel):
            assert (loads, stores) == vectors_of_update(kernel, template), template
        elif kernel.name in APART:
            assert min(loads, stores) >= 1, template
        elif kernel.name in READ_ONE or (kernel.name == "add_n" and template[2]):
            num_read = template[2] if kernel.name == "add_n" else 1
            assert (loads, stores) == (read * num_read, written), template
        else:  # a first one and a loop over the rest
            assert loads >= 2 * read, template
            assert stores >= written, template


# NVRTC 12.9 writes the same PTX up to sm_90, and the same from sm_100 on: 2026-11.
@programs_of(90, 100)
def test_only_the_tail_touches_single_elements(kernel, templates, program, tailless):
    for template in templates:
        name = kernel.expression(template)
        found = accesses(tailless.entries[name][1])
        if kernel.name == "segment_sum":  # a vector's divisor, where there can be one
            assert found.pop("ld.f64", 0) == (template[1] in FLOATS), template
        if kernel.name == "clip":  # the norm, once for a chunk
            assert found.pop("ld.f64", 0) == 1, template
        # Addresses and sizes come from the table by 64-bit loads, a segment's rows too.
        allowed = {"ld.global.v4.u32", "st.global.v4.u32", "ld.global.u64", "ld.u64"}
        assert set(found) <= allowed, template
        whole = accesses(program.entries[name][1])
        assert any(access.startswith("st.") and ".global" not in access for access in whole)
        if kernel.name == "add_n" and template[2] and "uint64" not in template:
            # The tail reads each input once, and writes the out once.
            tail = whole - found
            assert sum(n for access, n in tail.items() if access[:3] == "st.") == 1
            reads = {access: n for access, n in tail.items() if access[:3] == "ld."}
            assert sum(n for access, n in reads.items() if access != "ld.u64") == template[2]
