"""Finds devices by their names here, in TensorFlow and in PyTorch."""

from __future__ import annotations

import re
from typing import Any, Protocol, TypeGuard

from gradreduce.device import Device, Mesh
from gradreduce.errors import brief

from . import default_mesh

# "gpu:1", "cuda:1", "sim:1", "/gpu:1", "/device:GPU:1", "/job:worker/replica:0/task:3/device:GPU:1"
_NAME = re.compile(
    r"(?:(?:/job:\w+)?(?:/replica:[0-9]+)?(?:/task:[0-9]+)?/)?(?:device:)?(gpu|cuda|sim):([0-9]+)",
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


def is_device_like(value: object) -> TypeGuard[DeviceLike]:
    """Whether this is a device, a string or a ``torch.device``."""
    return isinstance(value, Device | str) or _is_torch(value)


def as_device(value: object, label: str, mesh: Mesh | None = None) -> Device:
    """Returns the device that an argument names.

    The number in a name is the index of the logical device; it differs from the GPU's if several
    logical devices share a GPU. ``"gpu:1"`` also names a simulated device. A ``torch.device`` means
    the first logical device on that GPU.

    Args:
        value: a Device; ``"gpu:1"`` or ``"sim:0"``; TensorFlow's ``"/gpu:1"`` or
            ``"/device:GPU:1"`` (a job, replica and task before it are ignored); or
            ``torch.device("cuda:1")``.
        label: the text before the value in errors, such as ``"device="``.
        mesh: a mesh or a part of one; a name is looked up in the whole mesh. Default:
            ``gr.default_mesh()``.

    Raises:
        TypeError: ``value`` is none of these.
        ValueError: the name is not valid, or the mesh has no such device.
    """
    if isinstance(value, Device):
        return value
    if not isinstance(value, str) and not _is_torch(value):
        raise TypeError(f"{label}{brief(value)} is not {_DEVICE}")
    whole = (default_mesh() if mesh is None else mesh).devices[0].mesh
    device = (
        _find_device(value, label, whole) if isinstance(value, str) else _torch_device(value, whole)
    )
    if device is None:
        raise ValueError(
            f"{label}{brief(value)} is not a device of {whole}, which has {len(whole)}"
        )
    return device


def as_devices(value: object, label: str, mesh: Mesh | None = None) -> tuple[Device, ...]:
    """Like ``as_device``; for a mesh returns all its devices.

    Raises:
        TypeError: ``value`` is neither a mesh nor a device as in ``as_device``.
        ValueError: what ``as_device`` raises.
    """
    if isinstance(value, Mesh):
        return value.devices
    if not is_device_like(value):
        raise TypeError(f"{label}{brief(value)} is not a Mesh, {_DEVICE}")
    return (as_device(value, label, mesh),)


def _is_torch(value: Any) -> TypeGuard[_TorchDevice]:
    """Whether this is a ``torch.device``, checked without importing PyTorch."""
    return (type(value).__module__, type(value).__name__) == ("torch", "device")


def _find_device(name: str, label: str, whole: Mesh) -> Device | None:
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(
            f'{label}{brief(name)} is not the name of a device, such as "gpu:1" or "sim:0"'
        )
    backend, number = parts[1].lower(), int(parts[2])
    if (backend == "sim" and whole.backend != "sim") or number >= len(whole):
        return None
    return whole.devices[number]


def _torch_device(value: _TorchDevice, whole: Mesh) -> Device | None:
    there = whole.by_physical.get(-1 if value.index is None else value.index, ())
    return whole.devices[there[0]] if value.type == "cuda" and there else None
