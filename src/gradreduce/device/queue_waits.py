"""Waits between our queues and callers' streams, for replayed work.

``adopt`` and ``release`` queue these waits at once. A replay calls neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buffer import Stream
from .device import Device
from .stream_sync import fork_streams, join_streams


def wait_for_stream(
    device: Device, stream: Stream, *, sharing: Sequence[Device] = (), checked: bool = False
) -> None:
    """Makes the compute queue wait for a caller's stream, as ``adopt`` does.

    Args:
        device: whose queue.
        stream: of the caller.
        sharing: devices of the same GPU, ``device`` among them, which follow it.
        checked: whether the caller has said ``check_stream``.
    """
    device.mesh_state.check_usable(device)
    capture = device.mesh_state.capture
    if capture is not None:
        for each in sharing or (device,):
            capture.enters(each, stream)
        return
    if not checked:
        device.check_stream(stream)
    freed = [(each, each._deferred_free.used_by(stream)) for each in sharing if each.freed]
    device._wait_for_stream(stream)
    if sharing:
        fork_streams(device, sharing)
    for each, users in freed:
        each._deferred_free.passed(users)


def block_stream(device: Device, stream: Stream | None, *, sharing: Sequence[Device] = ()) -> None:
    """Makes a caller's stream (None: the host) wait for the compute queue.

    Say ``check_stream`` before the work for which it waits.

    Args:
        device: whose queue.
        stream: of the caller.
        sharing: devices of the same GPU, ``device`` among them, for which it waits too.
    """
    device.mesh_state.check_usable(device)
    if sharing:
        join_streams(device, sharing)
    device._block_stream(stream)
