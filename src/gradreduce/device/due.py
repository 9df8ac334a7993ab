"""Calls with a deadline, over whatever meshes they work on; never watches any by itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from .base import Device
from .fabric import Fabric

__all__ = ["due"]


def due(
    call: str, deadline: float | None, devices: Iterable[Device]
) -> AbstractContextManager[object]:
    """What is given to the devices inside is over in time, or their mesh dies.

    Args:
        call: what to call it in the error.
        deadline: seconds from now, from ``as_deadline``; None for ever, which costs nothing.
        devices: all that it works on; of one mesh, as a rule.
    """
    if deadline is None:
        return nullcontext()
    meshes: dict[Fabric, list[Device]] = {}
    for device in devices:
        meshes.setdefault(device.fabric, []).append(device)
    stack = ExitStack()
    for fabric, of_mesh in meshes.items():
        stack.enter_context(fabric.due(call, deadline, of_mesh))
    return stack
