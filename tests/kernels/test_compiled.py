"""The shipped text built by g++: the cache, the refusals, and a table beyond the inline words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from exact import same
from faces import EXACT, INLINE_ROWS, blank, buffers, opened, operands, random_terms

from gradreduce.device import compiled
from gradreduce.device.kernel import kernel_text
from gradreduce.device.table import CHUNK_SIZE
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops import KERNELS
from gradreduce.ops.add_n import ADD_N
from gradreduce.ops.update import MOMENTUM

pytestmark = pytest.mark.host

BUILD = EXACT  # under the sanitizers too


def small():
    """add_n with one template: a new Kernel, which no earlier test has built in this process."""
    return replace(ADD_N, templates=(("float32", "float32", 2),))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path)
    return tmp_path


def refuse(*_, **__):
    raise AssertionError("a compiler was started")


def test_the_second_build_is_a_load(cache, monkeypatch):
    compiled.host_kernel(small(), BUILD)
    made = list(cache.iterdir())
    assert len(made) == 1
    monkeypatch.setattr(compiled.subprocess, "run", refuse)
    compiled.host_kernel(small(), BUILD)
    assert list(cache.iterdir()) == made


def test_one_process_asks_the_cache_once(cache, monkeypatch):
    kernel = small()
    first = compiled.host_kernel(kernel, BUILD)
    shutil.rmtree(cache)
    assert compiled.host_kernel(kernel, BUILD) is first


def test_text_templates_and_flags_are_in_the_key(cache, monkeypatch):
    compiled.host_kernel(small(), BUILD)
    compiled.host_kernel(replace(small(), templates=(("float32", "float32", 3),)), BUILD)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "kernel_text", lambda stem: kernel_text(stem) + "// changed\n")
        compiled.host_kernel(small(), BUILD)
    with monkeypatch.context() as patch:
        patch.setitem(compiled.BUILDS, BUILD, (*compiled.BUILDS[BUILD], "-DCHANGED"))
        compiled.host_kernel(small(), BUILD)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_target", lambda compiler: "another CPU")
        compiled.host_kernel(small(), BUILD)
    assert len(list(cache.iterdir())) == 5


def test_a_text_that_does_not_compile_is_named_with_its_line(cache, monkeypatch):
    lines = (compiled.kernel_text("update") + "\n").splitlines()
    place = lines.index("        mom[0] = decay * mom[0] + grad;")
    header = lines.index('#line 1 "kernels/rules.cuh"')
    lines[place] = "        mom[0] = decay * mom[0] + gradient;"
    monkeypatch.setattr(compiled, "kernel_text", lambda stem: "\n".join(lines))
    expected = rf"(?s)refused the {BUILD} build of momentum.*kernels/rules\.cuh:{place - header}:"
    with pytest.raises(RuntimeError, match=expected):
        compiled.host_kernel(replace(MOMENTUM), BUILD)
    assert list(cache.iterdir()) == []


def test_without_a_compiler_the_error_says_so(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"needs g\+\+.*install g\+\+"):
        compiled.host_kernel(small(), BUILD)


def test_a_build_that_does_not_load_is_an_error(cache):
    made = compiled._build(compiled._host_text(small()), "add_n", BUILD)
    made.write_bytes(b"no shared object")
    with pytest.raises(BackendUnavailableError, match="does not load"):
        compiled.host_kernel(small(), BUILD)


def test_the_sanitized_build_without_its_library_is_an_error():
    """libasan would end the process."""
    script = (
        "from gradreduce.device.compiled import host_kernel\n"
        "from gradreduce.errors import BackendUnavailableError\n"
        "from gradreduce.ops.add_n import ADD_N\n"
        "try:\n    host_kernel(ADD_N, 'sanitized')\n"
        "except BackendUnavailableError as error:\n    print(error)\n"
    )
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    plain["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env=plain, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "LD_PRELOAD=$(g++ -print-file-name=libasan.so)" in done.stdout


@pytest.mark.parametrize("build", ["exact", "fast"] if EXACT == "exact" else [EXACT])
@pytest.mark.parametrize("source", sorted({kernel.source for kernel in KERNELS}))
def test_no_build_has_warnings(source, build, tmp_path):
    kernel = next(kernel for kernel in KERNELS if kernel.source == source)
    text = compiled._host_text(replace(kernel, templates=kernel.templates[:3]))
    (tmp_path / "text.cpp").write_text(text)
    command = ["g++", *compiled.BUILDS[build], "-Werror", "-Wextra", "-o", "text.so", "text.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("face", ["compiled", "exact"] if EXACT == "exact" else [EXACT])
@pytest.mark.parametrize("num_rows", [INLINE_ROWS - 1, INLINE_ROWS, INLINE_ROWS + 1, 1000])
def test_a_table_may_lie_outside_the_parameters(face, num_rows):
    with opened(face) as device:
        rows = [operands(device, random_terms(1, 20, "float32", seed=k)) for k in range(num_rows)]
        outs = [blank(device, 20, "float32") for _ in range(num_rows)]
        table = [buffers([out, *row]) for out, row in zip(outs, rows, strict=True)]
        device.launch(ADD_N, ("float32", "float32", 1), table, (1,))
        made = device._tables.find(table, [20] * num_rows, CHUNK_SIZE)
        assert (made.held is not None) == (num_rows > INLINE_ROWS)
    assert all(same(out.array, row[0].values) for out, row in zip(outs, rows, strict=True))


def test_an_unknown_template_is_an_error():
    entry = compiled.host_kernel(small(), BUILD)
    with pytest.raises(KeyError):
        entry.run(("float64", "float64", 2), np.zeros(1, compiled.TABLE).ctypes.data, (2,))
