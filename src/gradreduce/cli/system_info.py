"""Describes this machine: versions, devices, loaded libnccl files.

Imports optional libraries by name, because an import loads the library's libnccl.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradreduce.backends import num_cores
from gradreduce.errors import INSTALL_CUDA, BackendUnavailableError, install_hint

if TYPE_CHECKING:
    from gradreduce.backends.cuda.gpus import Gpu

# Libraries that are imported, because they may load a libnccl; and how to install them.
_IMPORTED = {
    "CuPy": ("cupy", INSTALL_CUDA),
    "PyTorch": ("torch", install_hint("torch")),
    "JAX": ("jax", install_hint("jax")),
}
# Libraries that are not imported, because they load no libnccl.
_INSTALLED = {
    "Ray": ("ray", install_hint("ray")),
    "mpi4py": ("mpi4py", install_hint("mpi")),
    "Matplotlib": ("matplotlib", install_hint("cli")),
}


@dataclass(frozen=True)
class SystemInfo:
    """The found information; ``str`` returns it as lines of text.

    Attributes:
        versions: the version of each library, by name; None if it is not installed.
        gpus: the GPUs that CuPy sees.
        nccl: the libnccl files that this process has loaded, with their versions.
        missing: libraries and devices that cannot be used, with the reason and what to do.
        warnings: problems of installed libraries.
    """

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    nccl: tuple[str, ...]
    missing: dict[str, str]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        versions = {name: version or "not installed" for name, version in self.versions.items()}
        return "\n".join([
            *[f"{name:12}{version}" for name, version in versions.items()],
            *self.device_lines(),
            *[f"libnccl     {file}" for file in self.nccl],
            *[f"missing     {name}: {how}" for name, how in self.missing.items()],
            *[f"WARNING     {text}" for text in self.warnings],
        ])  # fmt: skip

    def device_lines(self) -> list[str]:
        """Returns a line for each GPU with its peers, or one that names the simulation."""
        if not self.gpus:
            return ["devices     no GPU: open_mesh() opens simulated devices on this machine's CPU"]
        lines = []
        for number, gpu in enumerate(self.gpus):
            peers = [str(other) for other, is_peer in enumerate(gpu.peers) if is_peer]
            lines.append(
                f"GPU {number:<8}{gpu.name}, compute capability {gpu.compute_capability}, "
                f"{gpu.nbytes / 2**30:.1f} GiB, peer access to {', '.join(peers) or 'no other GPU'}"
            )
        return lines


def find_system_info() -> SystemInfo:
    """Imports CuPy, PyTorch and JAX, where they are installed, and describes this machine."""
    from gradreduce.backends.cuda.libnccl import (
        libraries,
        several_text,
    )  # these take a tenth of the time of NumPy
    from gradreduce.backends.sim.host_compile import find_compiler

    versions = _own_versions()
    missing: dict[str, str] = {}
    for name, (module, how) in _IMPORTED.items():
        versions[name], problem = _import_version(module)
        if problem:
            missing[name] = f"{problem}; {how}"
    for name, (module, how) in _INSTALLED.items():
        versions[name] = _read_version(module)
        if versions[name] is None:
            missing[name] = f"not installed; {how}"
    gpus = () if "CuPy" in missing else _gpus(versions, missing)
    files = list(libraries())
    if not files:
        missing["NCCL"] = f"no libnccl is loaded; {INSTALL_CUDA}"
    try:
        find_compiler("fast")
    except BackendUnavailableError as error:
        missing["g++"] = str(error)
    several = several_text(files).removeprefix("; ")
    return SystemInfo(
        versions, gpus, tuple([file for file, _ in files]), missing, (several,) if several else ()
    )


def _own_versions() -> dict[str, str | None]:
    return {
        "gradreduce": sys.modules["gradreduce"].__version__,  # which imports this module
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }


def find_machine(gpus: Sequence[int]) -> dict[str, Any]:
    """Returns what times depend on: processor, number of cores, versions, and names of GPUs.

    Args:
        gpus: the numbers of the used GPUs; empty: none is named.
    """
    versions = _own_versions()
    machine = {"processor": processor(), "cores": num_cores(), "versions": versions}
    if gpus:
        versions["CuPy"], _ = _import_version("cupy")
        visible = _gpus(versions, {})
        machine["gpus"] = [visible[number].name for number in sorted(set(gpus))]
    return machine


def processor() -> str:
    """Returns the name of the processor, such as ``"AMD EPYC 7763"``, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show_versions() -> None:
    """Prints versions, devices, loaded libnccl files, and what is missing.

    Paste the text into a bug report. The call imports CuPy, PyTorch and JAX if they are installed,
    which may take seconds: each loads its libnccl when it is imported, and two different libnccl in
    a process are a known cause of hangs. The command ``gradreduce info`` prints the same as a
    table.

    Example:
        >>> gr.show_versions()
        gradreduce  ...
    """
    sys.stdout.write(f"{find_system_info()}\n")


def _import_version(module: str) -> tuple[str | None, str]:
    """Imports a library; returns its version, and a text about a problem."""
    try:
        version = getattr(import_module(module), "__version__", "unknown")
    except Exception as error:  # a broken library may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None, "not installed"
        return _read_version(module), f"cannot be imported ({error})"
    return str(version), ""


def _read_version(package: str) -> str | None:
    """Returns the version of an installed package without importing it."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus(versions: dict[str, str | None], missing: dict[str, str]) -> tuple[Gpu, ...]:
    """Returns the GPUs; adds the versions of CUDA, or why there is no GPU."""
    try:
        import_module("cupy.cuda.nccl")  # loads the libnccl of CuPy
    except ImportError as error:
        missing["NCCL of CuPy"] = f"cannot be imported ({error}); {INSTALL_CUDA}"
    try:
        from gradreduce.backends.cuda.gpus import cuda_versions, list_gpus

        gpus = list_gpus()
        versions.update({f"CUDA {name}": each for name, each in cuda_versions().items()})
    except (BackendUnavailableError, ImportError, OSError, RuntimeError) as error:
        missing["GPU"] = str(error)
        return ()
    return gpus
