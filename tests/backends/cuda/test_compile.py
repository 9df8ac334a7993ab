"""Compiling for GPUs: the cache on disk, what is missing, and the versions of CuPy."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cupy
import numpy as np
import pytest
from device.contract import SIZE, add, data, uploaded
from fake_cupy import surface
from support.exact_data import same
from support.spoiled_entries import SPOILED

import gradreduce as gr
from gradreduce.backends import kernel_cache, open_mesh
from gradreduce.backends.cuda import compile
from gradreduce.device import Mesh
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.fake_cupy
TEMPLATE = ("float32", "float32", 2)
MISSING = r"\(Failure finding \"libnvrtc[^\n]*\); pip install 'gradreduce\[cuda13\]'"


@pytest.fixture
def mesh(gpus) -> Iterator[Mesh]:
    gpus(2, num_gpus=3)
    with open_mesh([0, 0, 1], backend="cuda") as made:
        yield made


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of compiled kernels; the fake's own builds are there too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile, "_functions", {})
    kernel_cache._warn_once.cache_clear()
    return tmp_path / "gradreduce"


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The expressions that NVRTC compiles."""
    names, function = [], cupy.cuda.compiler.compile_using_nvrtc

    def record(text, options, *, name_expressions, **others):
        names.extend(name_expressions)
        return function(text, options, name_expressions=name_expressions, **others)

    monkeypatch.setattr(cupy.cuda.compiler, "compile_using_nvrtc", record)
    return names


def compile_kernel(mesh: Mesh, template=TEMPLATE) -> None:
    """Loads a kernel that this process has not loaded."""
    mesh.devices[0].compile_kernel(replace(ADD_N), template)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.cubin"))


def test_a_kernel_is_compiled_once_and_loaded_once_on_each_gpu(mesh, cache, compiled, monkeypatch):
    asked, kernel = [], replace(ADD_N)
    occupancy = "occupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(cupy.cuda.driver, occupancy, lambda _, *rest: asked.append(rest) or 8)
    for device in (*mesh.devices, *mesh.devices):
        device.compile_kernel(kernel, TEMPLATE)
    assert compiled == ["add_n<float, float, 2>"]
    assert asked == [(256, 0)] * 2


def test_different_kernels_are_compiled_at_the_same_time(mesh, cache, monkeypatch):
    both, load = threading.Barrier(2, timeout=60), compile._load
    monkeypatch.setattr(compile, "_load", lambda *args: (both.wait(), load(*args))[1])
    with ThreadPoolExecutor(2) as pool:
        templates = [("float32", "float32", count) for count in (1, 2)]
        list(pool.map(compile_kernel, [mesh[:1]] * 2, templates))


def test_another_process_loads_what_one_has_compiled(mesh, cache, compiled, monkeypatch):
    near = mesh.devices[0]
    for _ in range(2):
        monkeypatch.setattr(compile, "_functions", {})  # as in a new process
        out = uploaded(near, 1)
        add(near, out, uploaded(near, 2))
        assert same(out.numpy(), data((SIZE,), seed=2))
        assert len(compiled) == 1
    (file,) = files(cache)
    assert file.name.startswith("add_n-sm_90-")
    assert file.stat().st_mode & 0o777 == 0o600


def test_all_that_the_code_depends_on_is_in_the_key(mesh, cache, compiled, monkeypatch):
    compile_kernel(mesh)
    compile_kernel(mesh, ("float32", "float32", 1))
    text = compile.kernel_text("add_n") + "// changed\n"
    for place, name, value in (
        (compile, "kernel_text", lambda stem: text),
        (compile, "OPTIONS", (*compile.OPTIONS, "-lineinfo")),
        (surface.Device, "compute_capability", "80"),
        (cupy.cuda.nvrtc, "getVersion", lambda: (0, 1)),
        (cupy, "__version__", "14.3.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            compile_kernel(mesh)
    assert len(files(cache)) == len(compiled) == 7
    compile_kernel(mesh)
    assert len(compiled) == 7


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_that_is_not_ours_to_its_last_byte_is_compiled_anew(what, mesh, cache, compiled):
    compile_kernel(mesh)
    (file,) = files(cache)
    content = file.read_bytes()
    SPOILED[what](file)
    compile_kernel(mesh)
    assert len(compiled) == 2
    assert file.read_bytes() == content
    compile_kernel(mesh)
    assert len(compiled) == 2


def test_in_a_folder_that_others_can_write_nothing_is_kept(mesh, cache, compiled, caplog):
    compile_kernel(mesh)
    cache.chmod(0o770)
    compile_kernel(mesh)
    compile_kernel(mesh)
    assert len(compiled) == 1 + 2 * 2  # not kept: on each of two GPUs
    (message,) = caplog.messages
    assert f"every process builds its own: {cache} is owned by user" in message


def test_a_compile_error_points_into_the_source_file(mesh, cache, monkeypatch):
    monkeypatch.setattr(compile, "kernel_text", lambda stem: '#line 7 "kernels/add_n.cu"\nno C++\n')
    with pytest.raises(
        RuntimeError, match=r"(?s)NVRTC cannot compile add_n<float, float, 2>.*add_n.cu:7"
    ):
        compile_kernel(mesh)
    assert files(cache) == []


def test_a_missing_nvrtc_is_named(gpus, cache):
    gpus(2, nvrtc=False)
    with open_mesh(1, backend="cuda") as mesh:
        with pytest.raises(BackendUnavailableError, match=MISSING):
            compile_kernel(mesh)
        assert mesh.devices[0].put(np.ones(3)).numpy().sum() == 3  # the device has not failed


def test_an_error_of_the_driver_is_not_one_of_the_installation(mesh, monkeypatch):
    def refuse(*args):
        raise surface.CUDADriverError(2)  # out of memory

    monkeypatch.setattr(cupy.cuda.function.Module, "load", refuse)
    with pytest.raises(surface.CUDADriverError):
        compile_kernel(mesh)


REFUSED = r"CuPy {} is too old: .* 14\.2 or later; pip install 'gradreduce\[cuda13\]'"
FOR_AMD = r"CuPy 14\.2\.0 is built for AMD GPUs \(HIP\): uninstall it, then pip install 'gradred"


@pytest.mark.parametrize(
    ("version", "is_hip", "refused"),
    [
        *((version, False, REFUSED.format(version)) for version in ("14.1.1", "13.6.0", "9.12")),
        ("14.2.0", True, FOR_AMD),
        *((version, False, "") for version in ("14.2.0", "14.10.0rc1", "15.0.0")),
    ],
)
def test_a_cupy_that_cannot_be_used_is_refused_by_name(version, is_hip, refused, monkeypatch):
    monkeypatch.setattr(cupy, "__version__", version)
    monkeypatch.setattr(cupy.cuda.runtime, "is_hip", is_hip)
    with pytest.raises(BackendUnavailableError, match=refused) if refused else nullcontext():
        gr.open_mesh(1, backend="cuda").close()
