"""Waits between our queues and callers' streams, for replayed work.

``adopt`` and ``release`` queue these waits at once. A replay calls neither.
"""

from __future__ import annotations

from .buffer import Stream
from .device import Device

__all__ = ["block_stream", "wait_for_stream"]


def wait_for_stream(device: Device, stream: Stream, *, checked: bool = False) -> None:
    """Makes the compute queue wait for a caller's stream, as ``adopt`` does.

    Args:
        device: whose queue.
        stream: of the caller.
        checked: whether the caller has said ``check_stream``.
    """
    device.mesh_state.check_usable(device)
    entered = device.mesh_state.entering(device, stream)
    if entered is None:
        return
    if not checked:
        device.check_stream(stream)
    device._wait_for_stream(stream)


def block_stream(device: Device, stream: Stream | None) -> None:
    """Makes a caller's stream (None: the host) wait for the compute queue.

    Say ``check_stream`` before the work for which it waits.
    """
    device.mesh_state.check_usable(device)
    device._block_stream(stream)
