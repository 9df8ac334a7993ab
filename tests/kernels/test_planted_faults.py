"""Faults planted in the shipped text are found: by the comparison, or by AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from exact import same
from faces import blank, buffers, opened, operands, random_terms

from gradreduce.device import compiled
from gradreduce.device.kernel import kernel_text
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.host

SIZE = 1003
KNOWN, ANY = ("float32", "float32", 3), ("float32", "float32", 0)

# what -> (the text, what it becomes)
WRONG_ORDER = {
    "the last first": (
        "for (int k = 1; k < N; ++k) add_to(total, load<Acc, LANES>(in[k], i));",
        "for (int k = N - 1; k > 0; --k) add_to(total, load<Acc, LANES>(in[k], i));",
    ),
    "the last first, any number": (
        "for (i64 k = 1; k < num_inputs; ++k)",
        "for (i64 k = num_inputs - 1; k > 0; --k)",
    ),
    "an input left out": (
        "for (int k = 1; k < N; ++k) add_to",
        "for (int k = 2; k < N; ++k) add_to",
    ),
}
OFF_BY_ONE = {
    "the last element left out": (
        "i < end; i += blockDim.x) body.template at<1>(i);",
        "i < end - 1; i += blockDim.x) body.template at<1>(i);",
    ),
    "one element too many": (
        "i < end; i += blockDim.x) body.template at<1>(i);",
        "i < end + 1; i += blockDim.x) body.template at<1>(i);",
    ),
    "the first element left out": ("i64 i = tail + threadIdx.x", "i64 i = tail + 1 + threadIdx.x"),
}
# In the loops that the fast build leaves out.
OFF_BY_ONE_VECTOR = {
    "one vector too few": ("i < tail; i +=", "i < tail - LANES; i +="),
    "one vector too many": ("i < tail; i +=", "i < tail + LANES; i +="),
    "every thread a vector late": (
        "begin + (i64)threadIdx.x * LANES",
        "begin + (i64)(threadIdx.x + 1) * LANES",
    ),
}


def planted(fault):
    """The text of add_n with one fault in it."""
    sound, faulty = fault
    text = kernel_text("add_n")
    assert text.count(sound) == 1, f"the text has changed: {sound}"
    return text.replace(sound, faulty)


def right(face, template, starts, text, monkeypatch):
    """Whether the text, built as ``face`` builds it, gives what the twin does, and no more."""
    kernel = replace(ADD_N, templates=(template,))  # a new one: builds are kept by kernel
    monkeypatch.setattr(compiled, "kernel_text", lambda stem: text)
    terms = random_terms(3, SIZE, "float32")
    outs = []
    for used in (face, "numpy"):
        with opened(used) as device:
            out = blank(device, SIZE, "float32", starts[0])
            row = [out, *operands(device, terms, starts[1:])]
            device.launch(kernel, template, [buffers(row)], (3,))
        outs.append(out)
    return same(outs[0].array, outs[1].array) and outs[0].contained()


ALIGNED, MISALIGNED = [0, 0, 0, 0], [1, 1, 1, 1]


@pytest.fixture(params=["compiled", "exact"])
def host_face(request):
    """Not the sanitized one: it ends the process at the first wild write."""
    return request.param


@pytest.mark.parametrize("template", [KNOWN, ANY], ids=ADD_N.expression)
@pytest.mark.parametrize("starts", [ALIGNED, MISALIGNED])
def test_the_sound_text_passes(host_face, template, starts, monkeypatch):
    assert right(host_face, template, starts, kernel_text("add_n"), monkeypatch)


@pytest.mark.parametrize("fault", WRONG_ORDER.values(), ids=WRONG_ORDER)
@pytest.mark.parametrize("starts", [ALIGNED, MISALIGNED])
def test_a_wrong_order_shows(host_face, fault, starts, monkeypatch):
    template = ANY if "num_inputs" in fault[0] else KNOWN
    assert not right(host_face, template, starts, planted(fault), monkeypatch)


@pytest.mark.parametrize("fault", OFF_BY_ONE.values(), ids=OFF_BY_ONE)
@pytest.mark.parametrize("starts", [ALIGNED, MISALIGNED])
def test_a_wrong_tail_shows(host_face, fault, starts, monkeypatch):
    assert not right(host_face, KNOWN, starts, planted(fault), monkeypatch)


@pytest.mark.parametrize("fault", OFF_BY_ONE_VECTOR.values(), ids=OFF_BY_ONE_VECTOR)
def test_a_wrong_vector_loop_shows(host_face, fault, monkeypatch):
    caught = not right(host_face, KNOWN, ALIGNED, planted(fault), monkeypatch)
    assert caught == (host_face == "exact")


# A read that no value depends on: only the sanitizer can see it.
BEYOND = (
    "store(out, i, total);",
    "store(out, i, total); (void)*(const volatile In*)(in[0] + i + LANES);",
)
LAUNCH = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from gradreduce.device import compiled, open_mesh
from gradreduce.ops.add_n import ADD_N

text = Path(sys.argv[1]).read_text(encoding="utf-8")
compiled.kernel_text = lambda stem: text
template = ("float32", "float32", 3)
with open_mesh(1, backend="sim", kernels="sanitized") as mesh:
    row = [mesh.devices[0].adopt(np.ones(int(sys.argv[2]), np.float32)) for _ in range(4)]
    mesh.devices[0].launch(replace(ADD_N, templates=(template,)), template, [row], (3,))
    print("sums are", set(row[0].numpy().tolist()))
"""


def sanitized(text, size, folder):
    """A process that adds arrays of exactly ``size`` elements with this text."""
    path = folder / "add_n.cu"
    path.write_text(text, encoding="utf-8")
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    changed = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(path), str(size)],
        env={**os.environ, **changed},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_sound_text_passes_the_sanitizers(tmp_path):
    done = sanitized(kernel_text("add_n"), SIZE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sums are {3.0}\n"


@pytest.mark.parametrize("size", [SIZE, 1024])  # the tail reads beyond, or the last vector does
def test_a_read_beyond_an_operand_is_reported_with_its_line(size, tmp_path):
    text = planted(BEYOND)
    lines = text.splitlines()
    line = next(place for place, found in enumerate(lines) if BEYOND[1] in found)
    line -= lines.index('#line 1 "kernels/add_n.cu"')
    done = sanitized(text, size, tmp_path)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "READ of size 4" in done.stderr
    assert f"kernels/add_n.cu:{line}" in done.stderr


def test_no_value_shows_that_read(host_face, monkeypatch):
    """Which is why there is a sanitizer tier."""
    assert right(host_face, KNOWN, ALIGNED, planted(BEYOND), monkeypatch)


@pytest.mark.parametrize("fault", [OFF_BY_ONE["one element too many"]])
def test_a_write_beyond_an_operand_is_reported(fault, tmp_path):
    done = sanitized(planted(fault), SIZE, tmp_path)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
