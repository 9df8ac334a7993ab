"""One stem per kernel: ``.cu``, NumPy reference and test are complete and agree."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import gradreduce.ops
from gradreduce.device.run.kernel import kernels_folder
from gradreduce.ops import KERNELS, RuleKernel

KERNELS_FOLDER = kernels_folder()
OPS = Path(gradreduce.ops.__file__).parent
TESTS = Path(__file__).resolve().parent.parent / "ops"
STEMS = sorted(path.stem for path in KERNELS_FOLDER.glob("*.cu"))
# file -> the header that it includes, if it is not common.cuh
HEADERS = {"common.cuh": None, "update.cu": "rules.cuh"}
HEADERS |= dict.fromkeys(("exact_sum.cu", "add_words.cu"), "exact.cuh")


ENTRY = re.compile(
    r"template <(?P<template>(?:template <typename> class Rule, )?[^>]*)>\s*"
    r"__global__ void (?:__launch_bounds__\(.*?\) )?"
    r"(?P<name>\w+)\((?P<arguments>[^)]*)\)"
)


def text_of(stem):
    return (KERNELS_FOLDER / f"{stem}.cu").read_text(encoding="utf-8")


def entry_of(kernel):
    name = kernel.expression(kernel.templates[0]).partition("<")[0]
    return next(entry for stem, entry in ENTRIES if (stem, entry["name"]) == (kernel.source, name))


def entries_of(stem):
    text = text_of(stem)
    found = list(ENTRY.finditer(text))
    assert found, stem
    assert len(found) == text.count("__global__"), f"{stem}.cu has an entry of another variant"
    return found


# Files of ops/ without a kernel of that name.
SHARED = (
    "ranges", "row_index", "row_words", "running_sum", "segments", "templates", "update_rules",
    "words",
)  # fmt: skip
ENTRIES = [(stem, entry) for stem in STEMS for entry in entries_of(stem)]


def test_every_kernel_file_has_a_reference_and_a_test_and_the_other_way_round():
    assert STEMS
    assert sorted({path.stem for path in OPS.glob("[!_]*.py")} - set(SHARED)) == STEMS
    tests = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    assert tests >= set(STEMS)
    assert all(test.startswith((*STEMS, *SHARED)) for test in tests), (
        "of a kernel's part, or of none"
    )


def test_every_entry_has_a_kernel_and_the_other_way_round():
    used = {(kernel.source, entry_of(kernel)["name"]) for kernel in KERNELS}
    assert sorted(used) == sorted((stem, entry["name"]) for stem, entry in ENTRIES)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_constant_and_the_reference_have_the_names_of_the_entry(kernel):
    if isinstance(kernel, RuleKernel):
        prefix = "" if kernel.variant == "plain" else f"{kernel.variant}_"
        assert kernel.name == prefix + kernel.rule.name
        assert entry_of(kernel)["name"] == f"{prefix}update"
        return
    module = import_module(f"gradreduce.ops.{kernel.source}")
    assert getattr(module, kernel.name.upper()) is kernel
    assert kernel.reference is getattr(module, f"_{kernel.name}_reference")
    names = {kernel.name, f"{kernel.name}_command"}
    assert any(callable(getattr(gradreduce.ops, name, None)) for name in names)


@pytest.mark.parametrize("path", sorted(KERNELS_FOLDER.glob("*.cu*")), ids=lambda path: path.name)
def test_no_cuda_header_and_nothing_that_threads_share(path):
    text = path.read_text(encoding="utf-8")
    included = re.findall(r"^\s*#\s*include\s*(.*)$", text, re.MULTILINE)
    header = HEADERS.get(path.name, "common.cuh")
    assert included == ([f'"{header}"'] if header else [])
    assert not re.search(r"__shared__|__syncthreads|__shfl|atomic[A-Z]|curand|cuda_fp16", text)
