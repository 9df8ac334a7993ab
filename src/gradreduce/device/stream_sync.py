"""Waits between the streams of devices, mostly of co-located ones.

Co-located devices are logical devices of one physical device. One of them, the leader, launches for
all. It calls ``join_streams`` before the launch, so that its queue waits for theirs, and
``fork_streams`` after it, so that their queues wait for its queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .buffer import Buffer, Mark, Queue
from .peer_access import can_access, check_accessible

if TYPE_CHECKING:
    from .device import Device


def by_physical(devices: Sequence[Device]) -> dict[int, tuple[int, ...]]:
    """Maps each physical device to the indices of its logical devices, in order."""
    if len(devices) == 1:
        return {devices[0].physical: (0,)}
    indices: dict[int, list[int]] = {}
    for index, device in enumerate(devices):
        indices.setdefault(device.physical, []).append(index)
    return {physical: tuple(found) for physical, found in indices.items()}


def join_streams(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """Makes the leader's queue wait for the present work of the others.

    Call it after the last allocation, because memory is allocated in the order of its device's
    compute queue.
    """
    join_streams_each((leader,), others, queue)


def join_streams_each(leaders: Sequence[Device], others: Iterable[Device], queue: Queue) -> None:
    """Like ``join_streams`` for several leaders; marks each of the others once."""
    if not leaders or not leaders[0]._needs_order():
        return
    joined = dict.fromkeys(others)
    marks: dict[Device, Mark] = {}
    for leader in dict.fromkeys(leaders):
        for other in leader._others(joined) if queue == "compute" else joined:
            mark = marks.get(other)
            if mark is None:
                mark = marks[other] = other.mark()
            leader.wait(mark, queue=queue)


def fork_streams(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """Makes the queues of the others wait for the present work of the leader's queue."""
    if not leader._needs_order():
        return
    forked = dict.fromkeys(others)
    waiting = leader._others(forked) if queue == "compute" else forked
    if waiting:
        mark = leader.mark(queue)
        for other in waiting:
            other.wait(mark)


def ensure_accessible(device: Device, buffer: Buffer, queue: Queue = "compute") -> Buffer:
    """Returns ``buffer`` itself if launches of ``device`` can access it, else a copy.

    The caller then calls ``join_streams`` and ``fork_streams`` with the device of the result. If
    ``queue`` is not ``compute``, the caller also waits for a mark of it.

    Raises:
        BackendUnavailableError: the buffer's device has failed.
    """
    if _is_read(device, buffer):
        return buffer
    copied = device.empty(buffer.shape, buffer.dtype)
    device.copy(copied, buffer, queue=queue)
    return copied


def to_accessible(device: Device, buffer: Buffer) -> Buffer:
    """Like ``ensure_accessible``, but copies with ``copy_over``."""
    return buffer if _is_read(device, buffer) else to_local(device, buffer)


def to_local(device: Device, buffer: Buffer) -> Buffer:
    """Like ``to_accessible``, but also copies a peer's memory; co-located memory is not copied."""
    if buffer.device.physical == device.physical:
        return buffer
    return copied_to(device, buffer)


def copied_to(device: Device, buffer: Buffer) -> Buffer:
    """Returns a copy on ``device``, made by ``copy_over``."""
    copied = device.empty(buffer.shape, buffer.dtype)
    copy_over(device, copied, buffer)
    return copied


def _is_read(device: Device, buffer: Buffer) -> bool:
    """Whether launches of ``device`` can read the buffer in place; raises if its device failed."""
    if not can_access(device, buffer):
        return False
    check_accessible(device, buffer)
    return True


def copy_over(device: Device, dst: Buffer, src: Buffer) -> None:
    """Copies to ``device``; the source's device waits if a caller may write the source.

    The caller's stream, which waits for that device, then waits until its memory was read. In an
    all-reduce this is not needed: every device waits for all readers of its memory.
    """
    device.copy(dst, src)
    if src.device is not device and (not src.block.owned or src.block.gaps is not None):
        src.device.wait(device.mark())
