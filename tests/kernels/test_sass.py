"""``sass.txt`` has the figures of the shipped text, compiled by the NVRTCs that it names."""

import re
import tomllib
from pathlib import Path

import pytest
from kernels.nvrtc import WHEELS, compiled
from kernels.sass import (
    ARCHITECTURES,
    RECORD,
    VERSIONS,
    blocks_per_processor,
    disassembled,
    load_batches,
    measured,
    share_of_copy,
    templates,
)

from gradreduce.device.run.kernel import kernel_text
from gradreduce.ops import KERNELS
from gradreduce.ops.exact_sum import EXACT_SUM

NAMES = [kernel.expression(template) for kernel in KERNELS for template in templates(kernel)]


BLOCKS = {16: 8, 32: 8, 33: 6, 40: 6, 41: 5, 64: 4, 65: 3, 255: 1}  # of registers


@pytest.mark.parametrize("registers", BLOCKS)
def test_registers_decide_how_many_blocks_fit(registers):
    assert blocks_per_processor(registers) == BLOCKS[registers]


def test_the_table_has_every_kernel_for_every_gpu():
    keys = {(version, arch, name) for version in WHEELS for arch in ARCHITECTURES for name in NAMES}
    assert RECORD.keys() == keys


def test_nothing_in_the_table_is_spilled():
    """The file could have been edited by hand."""
    assert {spills for _, spills, *_ in RECORD.values()} == {"0"}


def test_a_batch_of_loads_ends_where_one_of_them_is_used():
    def load(register):
        return "LDG.E.128", f" R{register}, desc[UR4][R2.64]"

    add, other = ("FADD", " R20, R7, R20"), ("IADD3", " R2, P0, R2, UR4, RZ")
    assert load_batches([load(4), other, load(8), load(12), add]) == (3,)
    assert load_batches([load(4), load(8), add, load(12), ("STG.E.128", " [R2.64], R12")]) == (2, 1)
    assert load_batches([load(4), add, load(8), other, load(4), ("MOV", " R30, R11")]) == (1, 2)


def test_a_known_number_of_inputs_is_loaded_before_the_first_use():
    """Of a single input four vectors are loaded."""
    known = re.compile(r"pack|divide|(add_n|all_sum)<\w+, \w+, [^0]>")
    found = {name: figures[3] for (*_, name), figures in RECORD.items() if known.match(name)}
    assert found
    assert {name: batches for name, batches in found.items() if "+" in batches} == {}


# Terms of exact_sum<float, float, N>: instructions for a vector of each, as in ``Listing.issued``.
ISSUED = {2: (48, 112), 3: (84, 121), 4: (120, 132), 5: (156, 143), 6: (192, 154), 7: (228, 165),
          8: (264, 176)}  # fmt: skip


@pytest.mark.parametrize("num_terms", ISSUED)
def test_the_instructions_of_exact_sums_take_less_time_than_memory(num_terms):
    """As sums of float32 of which no element goes on to the integer."""
    assert share_of_copy(ISSUED[num_terms], 16 * (num_terms + 1)) >= 0.9
    assert share_of_copy((4000, 0), 16 * (num_terms + 1)) < 0.9


@pytest.mark.exhaustive
@pytest.mark.nvrtc(f"{WHEELS[12]}=={VERSIONS[12]}")
def test_the_instructions_of_exact_sums_are_those_that_are_compiled():
    names = [EXACT_SUM.expression(("float32", "float32", count)) for count in ISSUED]
    entries = compiled(kernel_text("exact_sum"), names, 90, 12).entries
    listings = disassembled([entries[name].code for name in names], 90)
    assert [listing.issued for listing in listings] == list(ISSUED.values())


@pytest.mark.repo
def test_the_extra_has_the_versions_of_the_table_and_no_other_brings_nvrtc_13():
    """CuPy for CUDA 12 compiles with NVRTC 13 if that is installed too."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = {
        name: {requirement.partition(";")[0] for requirement in requirements}
        for name, requirements in tomllib.loads(text)["project"]["optional-dependencies"].items()
    }
    assert {f"{WHEELS[version]}=={VERSIONS[version]}" for version in WHEELS} < extras.pop("nvrtc")
    others = set().union(*extras.values())
    assert not [each for each in others if re.match(rf"{WHEELS[13]}\b(?!-)", each)]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=pytest.mark.nvrtc(f"{WHEELS[version]}=={VERSIONS[version]}"))
        for version in WHEELS
    ],
)
def test_the_table_is_of_what_is_compiled(version):
    assert measured(version) == {
        key: figures for key, figures in RECORD.items() if key[0] == version
    }
