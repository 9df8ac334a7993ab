"""Fences of work that is given again, without the calls that made them the first time.

``adopt`` and ``release`` fence as they go. Who plays a tape passes by neither.
"""

from __future__ import annotations

from .buffer import Stream
from .device import Device

__all__ = ["block_stream", "wait_for_stream"]


def wait_for_stream(device: Device, stream: Stream, *, checked: bool = False) -> None:
    """The compute queue waits for what a caller's stream holds now, as in ``adopt``.

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
    """A caller's stream (None: the host) waits for the compute queue, as in ``release``.

    Say ``check_stream`` before the work for which it waits.
    """
    device.mesh_state.check_usable(device)
    device._block_stream(stream)
