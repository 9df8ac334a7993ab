"""Every template of every kernel compiles for every kind of GPU, to the expected code.

What is fused, shared and passed is read off the PTX; accesses, off the machine code: there a loop
is a jump back, and each access is in the innermost loop around it.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from kernels.nvrtc import WHEELS, compiled, options, options_of_cupy
from kernels.ptx.launches import is_flagged
from kernels.sass import ARCHITECTURES, RECORD, VERSIONS, disassembled, figures
from support.exhaustive import covering
from support.skip_rules import find_compiler
from support.update_operands import layout, rule_of

from gradreduce.device import as_dtype
from gradreduce.device.run.kernel import kernel_text
from gradreduce.device.run.table import TABLE
from gradreduce.ops import KERNELS, RuleKernel
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.nvrtc

# The exhaustive tier compiles all templates for the GPU of the figures, and some for every
# other: arch -> the first, and how many further the next one is. CI's compile tier compiles so many
# of each kernel's that every kind of element is among them, for sm_90 by NVRTC 12. A plain run
# compiles those of a few kernels, one of them for every GPU. test_sass.py compiles what the table
# has by both.
SAMPLES = {70: (0, 4), 75: (2, 4), 80: (1, 4), 90: (0, 1), 100: (0, 2), 120: (3, 4)}
FOR_ALL = "momentum"
PLAIN = (FOR_ALL, "add_n", "pack", "segment_sum")
PARAMETERS = ("version", "kernel", "arch", "templates")
# Read in another type than written, or once for a whole chunk: tested by other tests.
APART = ("square_sum", "clip")
# Divisions of 64 bits: for each chunk, vector and element of a tail; of take_rows for each chunk.
DIVISIONS = {"segment_sum": 4, "square_sum": 3, "take_rows": 2}
READ_ONE = ("pack", "scale", "divide", "take_rows")
VECTORS = {"LDG.E.128", "STG.E.128"}


def has_a_stand_in(kernel):
    """Of AGN's variants only the largest rule is compiled, except for one GPU."""
    return (
        isinstance(kernel, RuleKernel) and kernel.variant != "plain" and rule_of(kernel) != "adam"
    )


def few(kernel):
    """Templates in which every dtype occurs, signed or not; one if another kernel represents it."""
    if has_a_stand_in(kernel):
        return kernel.templates[-1:]
    values = [
        tuple(enumerate(str(part).removeprefix("u") for part in template))
        for template in kernel.templates
    ]
    return tuple(kernel.templates[number] for number in sorted(covering(values, 0, fewest=1)))


def programs_of(*archs):
    """Each kernel for each architecture and both NVRTCs in the tier; for sm_90 in a plain run."""
    values = []
    for kernel in KERNELS:
        for arch in archs if kernel.name == FOR_ALL else [90]:
            name = f"{kernel.name}-sm_{arch}-few"
            marks = () if kernel.name in PLAIN else (pytest.mark.exhaustive,)
            values.append(pytest.param(12, kernel, arch, few(kernel), id=name, marks=marks))
        for version in WHEELS:
            for arch in [90] if has_a_stand_in(kernel) else archs:
                first, step = SAMPLES[arch]
                some, name = kernel.templates[first::step], f"{kernel.name}-sm_{arch}-{version}"
                marks = (pytest.mark.exhaustive, pytest.mark.slow, needed(version))
                if (version, arch) != (13, 70):  # NVRTC 13 no longer supports it
                    values.append(pytest.param(version, kernel, arch, some, id=name, marks=marks))
    return pytest.mark.parametrize(PARAMETERS, values)


def needed(version):
    return pytest.mark.nvrtc(WHEELS[version])


@pytest.fixture(scope="module")
def programs(request, pool):
    """(version, kernel, arch, templates) -> the future of its program.

    What the collected tests need is compiled ahead, on all cores.
    """
    wanted = {}
    for item in request.session.items:
        if item.module is request.module and "programs" in item.fixturenames:
            params = item.callspec.params
            if find_compiler(WHEELS[params["version"]]):
                wanted[tuple(params[name] for name in PARAMETERS)] = None
    for version, kernel, arch, templates in wanted:
        names = [kernel.expression(template) for template in templates]
        wanted[version, kernel, arch, templates] = pool.submit(
            compiled, kernel_text(kernel.source), names, arch, version
        )
    return wanted


@pytest.fixture
def program(programs, version, kernel, arch, templates):
    return programs[version, kernel, arch, templates].result()


@pytest.fixture(scope="module")
def listings(programs):
    """(version, arch, name) -> machine code, for the architectures in the table."""
    codes = {}
    for (version, _, arch, _), program in programs.items():
        if arch in ARCHITECTURES:
            of_arch = codes.setdefault(arch, {})
            for name, entry in program.result().entries.items():
                of_arch[version, arch, name] = entry.code
    with ThreadPoolExecutor() as pool:
        made = pool.map(disassembled, [list(each.values()) for each in codes.values()], codes)
        return {
            key: listing
            for of_arch, found in zip(codes.values(), made, strict=True)
            for key, listing in zip(of_arch, found, strict=True)
        }


def vectors(kernel, template):
    """Numbers of 16-byte vectors per iteration of the vector loop, read and written."""
    types = [as_dtype(part).itemsize for part in template if isinstance(part, str)]
    lanes = 16 // min(types)
    return lanes * types[-1] // 16, lanes * types[0] // 16


def ahead(kernel, template):
    """Number of vectors of its only operand that are read before the first store, or 1."""
    one = kernel.name in (*READ_ONE, "clip") or template[2:] == (1,)
    read, _ = vectors(kernel, template)
    vectors_ahead = max(1, 4 // read) if one else 1
    return (vectors_ahead + 1) // 2 if kernel.name == "scale" else vectors_ahead


def vectors_of_update(kernel, template):
    """Numbers of 16-byte vectors per iteration, read and written, of all operands together."""
    lanes = 16 // min(as_dtype(part).itemsize for part in template)
    operands = [(kind, lanes * as_dtype(dtype).itemsize // 16)
                for kind, dtype in layout(kernel, template)]  # fmt: skip
    read = sum(n for kind, n in operands if kind != "copy")
    return read, sum(n for _, n in operands[:-1])


@pytest.mark.cupy
def test_the_options_are_those_of_cupy():
    assert options_of_cupy(90) == options(90)


def test_messages_point_into_the_shipped_file(pool):
    text = kernel_text("add_n").replace("store(out, i, total);", "store(out, i, total, 5);")
    with pytest.raises(RuntimeError, match=r"kernels/add_n\.cu\(\d+\): error"):
        pool.submit(compiled, text, [ADD_N.expression(("float32", "float32", 2))], 80).result()


@programs_of(*SAMPLES)
def test_nothing_is_spilled_shared_fused_or_flushed(version, kernel, templates, program):
    assert {name: entry.spills for name, entry in program.entries.items() if entry.spills} == {}
    assert ".local" not in program.ptx
    assert not re.search(r"\.shared|\bbar\.|\bbarrier\.|\batom\.|\bred\.|\bshfl\.", program.ptx)
    assert {entry.barriers for entry in program.entries.values()} == {0}
    assert not re.search(r"\bfma\.|\bmad\.\S*f\d\d", program.ptx)
    # ptxas may fuse an operation without .rn, which PTX does not show.
    arithmetic = re.findall(r"\b(?:add|sub|mul|div|sqrt)\.(\S*f(?:16|32|64))\b", program.ptx)
    assert set(arithmetic) <= {"rn.f32", "rn.f64"}
    assert ".ftz" not in program.ptx
    kinds = {"int64": "u64", "float64": "f64"}
    expected = [f"align 8 .b8 [{TABLE.itemsize}]", *(kinds[kind] for _, kind in kernel.scalars)]
    for entry in program.entries.values():
        found = re.findall(r"\.param \.(.*?) ?\w+_param_\d+(\[\d+\])?", entry.parameters)
        assert [" ".join(filter(None, part)) for part in found] == expected
        assert len(re.findall(r"\bdiv\.[us]64", entry.body)) <= DIVISIONS.get(kernel.name, 0)


@programs_of(*ARCHITECTURES)
def test_operands_are_moved_by_vectors_or_by_several_loads_at_once(
    version, kernel, arch, templates, listings
):
    for template in templates:
        listing = listings[version, arch, kernel.expression(template)]
        loads, stores = (listing.number(kind, wide=True) for kind in ("LD", "ST"))
        read, written = vectors(kernel, template)
        # Exactly so many vectors if the compiler knows the number of operands, or at least.
        if isinstance(kernel, RuleKernel):
            assert (loads, stores) == vectors_of_update(kernel, template), template
        elif kernel.name in APART:
            assert min(loads, stores) >= 1, template
        elif kernel.name in READ_ONE or (kernel.name == "add_n" and template[2]):
            num_read = template[2] if kernel.name == "add_n" else 1
            turns = ahead(kernel, template)
            assert (loads, stores) == (read * num_read * turns, written * turns), template
        else:  # a first one and a loop over the rest; float64 is added in one loop
            is_one_loop = kernel.name == "exact_sum" and is_flagged(kernel, template)
            assert loads >= (1 if is_one_loop else 2) * read, template
            assert stores >= written, template
        # A loop over vectors has no single elements, except addresses, indices, divisors and flags.
        assert {access.split(".")[0] for access in listing.accesses} <= {"LD", "LDG", "ST", "STG"}
        over_vectors = [set(loop) for loop in listing.loops if VECTORS & loop.keys()]
        assert over_vectors, template
        if kernel.name != "square_sum":  # the last vector of a block may be cut
            flag = {"ST.E"} if is_flagged(kernel, template) else set()
            assert set().union(*over_vectors) <= {*VECTORS, "LD.E.64", *flag}, template
        # A row that is not aligned: three loads of each operand, or more of the only one; there
        # three if a vector loop has four.
        if kernel.items is None:
            several = read < 4 and (kernel.name != "scale" or ahead(kernel, template) > 1)
            several &= kernel.name != "exact_sum" or not is_flagged(kernel, template)
            assert sum(listing.unaligned) >= (5 if several else 3), template


@pytest.mark.nvrtc(f"{WHEELS[12]}=={VERSIONS[12]}")
@programs_of(90)
def test_figures_are_those_of_the_table(version, kernel, templates, program, listings):
    """For the templates in the table; ``sass.py`` describes how to regenerate it."""
    found = {
        (version, 90, name): figures(entry, listings[version, 90, name])
        for name, entry in program.entries.items()
    }
    recorded = {key: RECORD[key] for key in found.keys() & RECORD.keys()}
    assert {key: found[key] for key in recorded} == recorded
