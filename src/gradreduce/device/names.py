"""Devices by name: ours, and TensorFlow's; never opens one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Device
    from .mesh import Mesh

__all__ = ["device_named"]

# "gpu:1", "cuda:1", "sim:1", "/gpu:1", "/device:GPU:1", "/job:worker/replica:0/task:3/device:GPU:1"
_NAME = re.compile(
    r"(?:(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/)?(?:device:)?(gpu|cuda|sim):(\d+)",
    re.IGNORECASE,
)


def device_named(name: str, mesh: Mesh) -> Device:
    """The logical device of that number in the whole mesh.

    Simulated devices stand for GPUs: they answer to ``"gpu:1"`` too. The number is the logical
    one: with several devices on one GPU it is not the GPU's.

    Args:
        name: ``"gpu:1"`` or ``"sim:0"``; TensorFlow's ``"/gpu:1"`` and ``"/device:GPU:1"``, with
            or without a job, replica and task in front, which are not looked at.
        mesh: any part of the mesh.

    Raises:
        ValueError: not such a name, or the mesh has no such device.
    """
    whole = mesh.devices[0].mesh
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f'{name!r} is not the name of a device, such as "gpu:1" or "sim:0"')
    backend, number = found[1].lower(), int(found[2])
    simulated = whole.backend == "sim"
    if (backend == "sim" and not simulated) or number >= len(whole.devices):
        raise ValueError(f"{name!r} is no device of {whole}, which has {len(whole.devices)}")
    return whole.devices[number]
