"""Describes the visible GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from cupy.cuda import runtime

from .streams import visible_gpus


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Attributes:
        name: the name of the model.
        compute_capability: such as ``"9.0"``.
        nbytes: the size of its memory.
        peers: for each visible GPU, whether this one can access its memory, according to CUDA.
    """

    name: str
    compute_capability: str
    nbytes: int
    peers: tuple[bool, ...]


def list_gpus() -> tuple[Gpu, ...]:
    """Returns the visible GPUs, in CUDA's order; creates no context on them.

    Raises:
        BackendUnavailableError: there is no driver or no GPU.
    """
    numbers = range(visible_gpus())
    gpus = []
    for gpu in numbers:
        properties = runtime.getDeviceProperties(gpu)
        peers = [
            gpu != other and bool(runtime.deviceCanAccessPeer(gpu, other)) for other in numbers
        ]
        gpus.append(
            Gpu(
                bytes(properties["name"]).decode(errors="replace"),
                f"{properties['major']}.{properties['minor']}",
                int(properties["totalGlobalMem"]),
                tuple(peers),
            )
        )
    return tuple(gpus)


def cuda_versions() -> dict[str, str]:
    """Returns the CUDA versions of the driver and of the runtime that CuPy uses."""
    versions = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    return {name: f"{each // 1000}.{each % 1000 // 10}" for name, each in versions.items()}
