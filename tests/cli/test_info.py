"""``gradreduce info``, ``gr.show_versions()`` and the command itself."""

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import gradreduce as gr
from gradreduce import __main__ as entry
from gradreduce.backends.cuda import libnccl
from gradreduce.cli import system_info
from gradreduce.cli.app import command


def run(*arguments: str):
    return CliRunner().invoke(command, arguments)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Stand-ins for libraries: PyTorch is installed, CuPy is broken, JAX is missing."""

    def imported(name):
        if name == "torch":
            return SimpleNamespace(__version__="2.99")
        if name == "cupy":
            raise ImportError("libcudart.so.12 is missing")
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(system_info, "import_module", imported)


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """Makes this process seem to have loaded files of these names."""

    def load(*names):
        maps = tmp_path / "maps"
        lines = [
            f"7f00-7f01 r-xp 00000000 08:01 42 {tmp_path / name}/libnccl.so.2" for name in names
        ]
        maps.write_text("\n".join([*lines, *lines]))
        monkeypatch.setattr(libnccl, "_MAPS", maps)
        return [f"{tmp_path / name}/libnccl.so.2" for name in names]

    return load


def test_info_tells_versions_and_what_is_missing(loaded, tmp_path):
    loaded()
    result = run("info", "--json", str(tmp_path / "info.json"))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["PyTorch", "2.99"] in lines
    assert ["JAX", "not", "installed"] in lines
    assert "pip install 'gradreduce[jax]' (in a clone: pip install '.[jax]')" in result.output
    assert "cannot be imported (libcudart.so.12 is missing)" in result.output
    assert "no libnccl is loaded" in result.output
    assert "WARNING" not in result.output
    assert "Versions" in result.output
    found = json.loads((tmp_path / "info.json").read_text())
    assert found["versions"]["gradreduce"] == gr.__version__
    assert found["versions"]["JAX"] is None


def test_two_libnccl_files_are_a_warning(loaded, capsys):
    (file,) = loaded("cupy")
    found = json.loads(run("info", "--json", "-").output)
    assert (found["nccl"], found["warnings"]) == ([file], [])
    one, other = loaded("cupy", "torch")
    found = json.loads(run("info", "--json", "-").output)
    assert found["nccl"] == [one, other]
    (warning,) = found["warnings"]
    assert warning.startswith(f"this process has loaded 2 libnccl files: {one}, {other};")
    assert "NCCL" not in found["missing"]
    gr.show_versions()
    assert f"WARNING     {warning}" in capsys.readouterr().out.splitlines()
    assert "WARNING: this process has loaded 2 libnccl files" in run("info").output


@pytest.mark.parametrize("name", ["click", "rich"])
def test_a_missing_library_of_the_command_is_named(monkeypatch, name):
    for module in list(sys.modules):
        if module.startswith(("gradreduce.cli", f"{name}.")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # its import fails
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == (
        f"the gradreduce command needs {name}, which is not installed: "
        "pip install 'gradreduce[cli]' (in a clone: pip install '.[cli]')"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "3"],
        *[pytest.param([each], marks=pytest.mark.exhaustive) for each in ("info", "--help")],
    ],
)
def test_a_full_disk_is_one_line(arguments):
    environment = {"GRADREDUCE_BACKEND": "sim", "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "gradreduce", *arguments], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=120, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"gradreduce: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n"
