"""Finds devices by name, as written here, in TensorFlow and in PyTorch."""

from __future__ import annotations

import re
from typing import Any, Protocol, TypeGuard

from gradreduce.device import Device, Mesh
from gradreduce.errors import brief

from . import default_mesh

__all__ = ["DeviceLike", "as_device", "as_devices", "is_device_like"]

# "gpu:1", "cuda:1", "sim:1", "/gpu:1", "/device:GPU:1", "/job:worker/replica:0/task:3/device:GPU:1"
_NAME = re.compile(
    r"(?:(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/)?(?:device:)?(gpu|cuda|sim):(\d+)",
    re.IGNORECASE,
)
_DEVICE = 'a Device, the name of one such as "gpu:1", or a torch.device'


class _TorchDevice(Protocol):
    """A ``torch.device``."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


DeviceLike = Device | str | _TorchDevice


def is_device_like(given: object) -> TypeGuard[DeviceLike]:
    """Whether this is a device, a string or a ``torch.device``."""
    return isinstance(given, Device | str) or _is_torch(given)


def as_device(given: object, label: str, mesh: Mesh | None = None) -> Device:
    """Returns the device that an argument names.

    The number in a name is that of the logical device: with several on one GPU it is not the
    GPU's. Simulated devices stand for GPUs and answer to ``"gpu:1"`` too. A ``torch.device`` is a
    GPU, and means the first logical device there.

    Args:
        given: a device; ``"gpu:1"`` or ``"sim:0"``; TensorFlow's ``"/gpu:1"`` and
            ``"/device:GPU:1"``, with or without a job, replica and task in front, which are not
            looked at; or ``torch.device("cuda:1")``.
        label: what errors write before it: ``"device="``.
        mesh: in whose whole mesh a name is looked up. Default: ``gr.default_mesh()``.

    Raises:
        TypeError: none of these.
        ValueError: not such a name, or the mesh has no such device.
    """
    if isinstance(given, Device):
        return given
    if not isinstance(given, str) and not _is_torch(given):
        raise TypeError(f"{label}{brief(given)} is not {_DEVICE}")
    whole = (default_mesh() if mesh is None else mesh).devices[0].mesh
    found = _named(given, label, whole) if isinstance(given, str) else _torch_device(given, whole)
    if found is None:
        raise ValueError(
            f"{label}{brief(given)} is not a device of {whole}, which has {len(whole)}"
        )
    return found


def as_devices(given: object, label: str, mesh: Mesh | None = None) -> tuple[Device, ...]:
    """As ``as_device``; returns all devices for a mesh.

    Raises:
        TypeError: neither a mesh nor what ``as_device`` takes.
        ValueError: what ``as_device`` raises.
    """
    if isinstance(given, Mesh):
        return given.devices
    if not is_device_like(given):
        raise TypeError(f"{label}{brief(given)} is not a Mesh, {_DEVICE}")
    return (as_device(given, label, mesh),)


def _is_torch(given: Any) -> TypeGuard[_TorchDevice]:
    """Whether this is a ``torch.device``, checked without importing PyTorch."""
    return (type(given).__module__, type(given).__name__) == ("torch", "device")


def _named(name: str, label: str, whole: Mesh) -> Device | None:
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(
            f'{label}{brief(name)} is not the name of a device, such as "gpu:1" or "sim:0"'
        )
    backend, number = parts[1].lower(), int(parts[2])
    if (backend == "sim" and whole.backend != "sim") or number >= len(whole):
        return None
    return whole.devices[number]


def _torch_device(given: _TorchDevice, whole: Mesh) -> Device | None:
    there = whole.by_physical.get(-1 if given.index is None else given.index, ())
    return whole.devices[there[0]] if given.type == "cuda" and there else None
