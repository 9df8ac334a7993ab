"""The shipped text built by g++: the cache, errors, and tables that are not inline."""

import errno
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from support.implementations import (
    EXACT,
)
from support.spoiled_entries import SPOILED

from gradreduce.backends import kernel_cache
from gradreduce.backends.sim import host_compile
from gradreduce.device.log import op_log
from gradreduce.device.run.kernel import kernel_text
from gradreduce.errors import BackendUnavailableError
from gradreduce.ops import KERNELS, RULE_KERNELS, RULES
from gradreduce.ops.add_n import ADD_N

pytestmark = pytest.mark.host

BUILD = EXACT  # with sanitizers too


def small():
    """A new Kernel, add_n with one template, which no earlier test in this process has built."""
    return replace(ADD_N, templates=(("float32", "float32", 2),))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of builds; scratch folders go beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernel_cache._warn_once.cache_clear()
    folder = tmp_path / "gradreduce"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    made = tmp_path_factory.mktemp("built") / "add_n-small.so"
    return host_compile._compile("g++", host_compile._host_text(small()), made, BUILD).read_bytes()


@pytest.fixture
def builds(built, monkeypatch):
    made = []

    def build(compiler, text, path, build):
        path.write_bytes(built)
        made.append(path)
        return path

    monkeypatch.setattr(host_compile, "_compile", build)
    return made


def refuse(*_, **__):
    raise AssertionError("a compiler was started")


def test_the_second_build_is_a_load(cache, monkeypatch):
    host_compile.host_kernel(small(), BUILD)
    made = list(cache.iterdir())
    assert len(made) == 1
    monkeypatch.setattr(host_compile.subprocess, "run", refuse)
    kernel = small()
    first = host_compile.host_kernel(kernel, BUILD)
    assert list(cache.iterdir()) == made
    assert list(cache.parent.iterdir()) == [cache]
    shutil.rmtree(cache)
    assert host_compile.host_kernel(kernel, BUILD) is first
    with pytest.raises(KeyError):
        first["float64", "float64", 2]


def test_text_templates_and_flags_are_in_the_key(cache, builds, monkeypatch):
    host_compile.host_kernel(small(), BUILD)
    host_compile.host_kernel(replace(small(), templates=(("float32", "float32", 3),)), BUILD)
    flags = {**host_compile.BUILDS, BUILD: (*host_compile.BUILDS[BUILD], "-DCHANGED")}
    for name, value in (
        ("kernel_text", lambda stem: kernel_text(stem) + "// changed\n"),
        ("BUILDS", flags),
        ("_target", lambda compiler: "another CPU"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(host_compile, name, value)
            host_compile.host_kernel(small(), BUILD)
    assert len(builds) == len(list(cache.iterdir())) == 5


def test_a_text_that_does_not_compile_is_named_with_its_line(cache, monkeypatch):
    lines = (host_compile.kernel_text("update") + "\n").splitlines()
    place = lines.index("        mom[0] = decay * mom[0] + grad;")
    header = lines.index('#line 1 "kernels/rules.cuh"')
    lines[place] = "        mom[0] = decay * mom[0] + gradient;"
    monkeypatch.setattr(host_compile, "kernel_text", lambda stem: "\n".join(lines))
    expected = (
        rf"(?s)cannot compile the {BUILD} build of momentum.*kernels/rules\.cuh:{place - header}:"
    )
    with pytest.raises(RuntimeError, match=expected):
        host_compile.host_kernel(replace(RULE_KERNELS[RULES["momentum"], "plain"]), BUILD)
    assert list(cache.iterdir()) == []


def test_a_build_that_does_not_load_is_an_error(cache, monkeypatch):
    def nonsense(compiler, text, path, build):
        path.write_bytes(b"no shared object")
        return path

    monkeypatch.setattr(host_compile, "_compile", nonsense)
    another = replace(small(), templates=(("float32", "float32", 5),))
    with pytest.raises(BackendUnavailableError, match="cannot be loaded"):
        host_compile.host_kernel(another, BUILD)
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("what", SPOILED)
def test_an_entry_that_is_not_ours_to_its_last_byte_is_built_anew(what, cache, builds):
    host_compile.host_kernel(small(), BUILD)
    (entry,) = cache.iterdir()
    content = entry.read_bytes()
    SPOILED[what](entry)
    host_compile.host_kernel(small(), BUILD)
    assert len(builds) == 2
    assert entry.read_bytes() == content
    assert entry.lstat().st_mode == stat.S_IFREG | 0o600
    host_compile.host_kernel(small(), BUILD)
    assert len(builds) == 2


NOT_OURS = {
    "a group can write it": lambda folder, patch: folder.chmod(0o770),
    "others can write it": lambda folder, patch: folder.chmod(0o707),
    "another owner": lambda folder, patch: patch.setattr(
        kernel_cache.os, "geteuid", lambda: folder.stat().st_uid + 1
    ),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_a_folder_that_others_can_write_is_not_used(what, cache, builds, monkeypatch, caplog):
    host_compile.host_kernel(small(), BUILD)
    (entry,) = cache.iterdir()
    before = entry.stat()
    NOT_OURS[what](cache, monkeypatch)
    for _ in range(2):
        host_compile.host_kernel(small(), BUILD)
    assert len(builds) == 3
    assert (list(cache.iterdir()), entry.stat()) == ([entry], before)
    assert list(cache.parent.iterdir()) == [cache]  # the private build was removed
    (message,) = caplog.messages
    assert f"every process builds its own: {cache} is owned by user" in message


def test_a_folder_that_is_exchanged_after_it_was_checked_is_not_loaded_from(
    cache, builds, monkeypatch
):
    """Whoever can write to the parent folder can do that."""
    host_compile.host_kernel(small(), BUILD)
    (entry,) = cache.iterdir()
    read = host_compile.read_entry

    def exchanged(path, key):
        content = read(path, key)
        cache.rename(cache.with_name("away"))
        cache.mkdir()
        entry.write_bytes(b"loaded by mistake: this raises")
        return content

    monkeypatch.setattr(host_compile, "read_entry", exchanged)
    host_compile.host_kernel(small(), BUILD)
    assert len(builds) == 1


def test_where_nothing_can_be_kept_each_process_builds(
    tmp_path, cache, builds, monkeypatch, caplog
):
    """No home, a folder that cannot be made, and a full disk, which leaves no file."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def nobody(uid):
        raise KeyError(uid)

    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "relative")  # as if it were not set
        patch.setenv("HOME", str(tmp_path / "home"))
        host_compile.host_kernel(small(), BUILD)
    assert len(list((tmp_path / "home" / ".cache" / "gradreduce").iterdir())) == 1
    monkeypatch.setattr(op_log.os, "fsync", full)
    host_compile.host_kernel(small(), BUILD)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    host_compile.host_kernel(small(), BUILD)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # as if it were not set
    for home in (None, "", "relative"):
        if home is None:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(pwd, "getpwuid", nobody)
        else:
            monkeypatch.setenv("HOME", home)
        host_compile.host_kernel(small(), BUILD)
    assert len(builds) == 6
    assert list(cache.iterdir()) == []
    assert {each.name for each in tmp_path.iterdir()} == {"gradreduce", "file", "home"}
    reasons = [message.rpartition("its own: ")[2] for message in caplog.messages]
    folder = tmp_path / "file" / "gradreduce"
    assert reasons[:2] == ["No space left on device", f"Not a directory: {folder}"]
    assert "home directory" in reasons[2]
    assert "HOME" in reasons[3]


def test_a_compiler_that_is_broken_or_missing(tmp_path, cache, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho cannot find cc1plus >&2\nexit 3\n")
    monkeypatch.setattr(host_compile.shutil, "which", lambda name: str(compiler))
    with pytest.raises(BackendUnavailableError, match=r"g\+\+ cannot be run: .*Permission denied"):
        host_compile.host_kernel(small(), BUILD)
    compiler.chmod(0o700)
    with pytest.raises(BackendUnavailableError, match=r"(?s)exit status 3.*cannot find cc1plus"):
        host_compile.host_kernel(small(), BUILD)
    monkeypatch.setattr(host_compile, "_target", lambda compiler: "")
    with pytest.raises(RuntimeError, match=r"(?s)compile.*exit status 3.*cannot find cc1plus"):
        host_compile.host_kernel(small(), BUILD)
    monkeypatch.setattr(host_compile.shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"needs g\+\+.*install g\+\+"):
        host_compile.host_kernel(small(), BUILD)


def test_the_sanitized_build_without_its_library_is_an_error():
    """libasan would terminate the process."""
    script = (
        "from gradreduce.backends.sim.host_compile import host_kernel\n"
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
@pytest.mark.parametrize(
    "flags", [("-fsyntax-only",), pytest.param(("-o", "text.so"), marks=pytest.mark.exhaustive)]
)
def test_no_build_has_warnings(source, build, flags, tmp_path):
    """Those of the optimizer in the tier."""
    kernel = next(kernel for kernel in KERNELS if kernel.source == source)
    text = host_compile._host_text(replace(kernel, templates=kernel.templates[:3]))
    (tmp_path / "text.cpp").write_text(text)
    command = ["g++", *host_compile.BUILDS[build], "-Werror", "-Wextra", *flags, "text.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
