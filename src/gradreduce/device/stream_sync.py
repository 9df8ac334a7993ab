"""Logical devices that share a physical one, and how one of them works for several.

Co-located devices share launches: one of them, the leader, launches for all. It says ``gather``
before, so that its queue comes behind theirs, and ``scatter`` after, so that theirs come behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .buffer import Buffer, Mark, Queue
from .peer_access import check_reach, reaches

if TYPE_CHECKING:
    from .device import Device

__all__ = ["bring", "by_physical", "copy_over", "fetch", "gather", "gather_all", "pull", "scatter"]


def by_physical(devices: Sequence[Device]) -> dict[int, tuple[int, ...]]:
    """Physical device -> the places in ``devices`` of its logical ones; first seen first."""
    if len(devices) == 1:
        return {devices[0].physical: (0,)}
    places: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device.physical, []).append(place)
    return {physical: tuple(found) for physical, found in places.items()}


def gather(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """What the leader's queue is given from now on comes behind what the others hold so far.

    Say it after the last allocation: memory comes in the order of its device's compute queue.
    """
    others = dict.fromkeys(others)
    if not _is_all(leader, others, queue):
        gather_all([leader], others, queue)


def gather_all(leaders: Iterable[Device], others: Iterable[Device], queue: Queue) -> None:
    """As ``gather`` for several leaders, with one mark of each of the others for all of them."""
    _fenced(_gather, dict.fromkeys(leaders), dict.fromkeys(others), queue)


def scatter(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """What the others launch from now on comes behind what the leader's queue holds so far."""
    others = dict.fromkeys(others)
    if not _is_all(leader, others, queue):
        _fenced(_scatter, (leader,), others, queue)


def _is_all(leader: Device, others: dict[Device, None], queue: Queue) -> bool:
    """Whether there is nobody else: a queue comes behind itself without a fence."""
    return queue == "compute" and len(others) == 1 and leader in others


def _fenced(
    fence: Callable[[Sequence[Device], Sequence[Device], Queue], None],
    leaders: Iterable[Device],
    others: Iterable[Device],
    queue: Queue,
) -> None:
    """Fences; on a tape it is kept whole, because each time something else may be left out."""
    again = partial(fence, tuple(leaders), tuple(others), queue)
    fabric = again.args[0][0].fabric if again.args[0] else None
    if fabric is None or fabric.tape is None:
        again()
        return
    tape = fabric.tape
    with fabric.taped(None):
        again()
    tape.add(again, (), ())


def _gather(leaders: Sequence[Device], others: Sequence[Device], queue: Queue) -> None:
    marks: dict[Device, Mark] = {}
    for leader in leaders:
        for other in leader._unjoined(others) if queue == "compute" else others:
            mark = marks.get(other)
            if mark is None:
                mark = marks[other] = other.mark()
            leader.wait(mark, queue=queue)


def _scatter(leaders: Sequence[Device], others: Sequence[Device], queue: Queue) -> None:
    (leader,) = leaders
    waiting = leader._led(others) if queue == "compute" else others
    if waiting:
        mark = leader.mark(queue)
        for other in waiting:
            other.wait(mark)


def bring(device: Device, buffer: Buffer, queue: Queue = "compute") -> Buffer:
    """``buffer`` where launches of ``device`` read it: itself if they reach it, else a copy.

    ``gather`` afterwards, with the device of what this returns, and ``scatter`` to it; and if
    another queue than ``compute`` copied, its mark must be waited for.

    Raises:
        BackendUnavailableError: its device is lost.
    """
    if _is_read(device, buffer):
        return buffer
    copied = device.empty(buffer.shape, buffer.dtype)
    device.copy(copied, buffer, queue=queue)
    return copied


def fetch(device: Device, buffer: Buffer) -> Buffer:
    """As ``bring``, by ``copy_over``."""
    return buffer if _is_read(device, buffer) else pull(device, buffer)


def pull(device: Device, buffer: Buffer) -> Buffer:
    """As ``fetch``, but a peer's is copied too: only co-located memory is left where it is."""
    if buffer.device.physical == device.physical:
        return buffer
    copied = device.empty(buffer.shape, buffer.dtype)
    copy_over(device, copied, buffer)
    return copied


def _is_read(device: Device, buffer: Buffer) -> bool:
    """Whether launches of ``device`` read it where it lies; raises if its device is lost."""
    if not reaches(device, buffer):
        return False
    check_reach(device, buffer)
    return True


def copy_over(device: Device, dst: Buffer, src: Buffer) -> None:
    """``device`` copies, and the source's own device comes behind it if a caller may write that.

    Then a fence of that device alone tells the caller's stream that its memory was read. In an
    all-reduce every device comes behind all that read its memory as it is.
    """
    device.copy(dst, src)
    if src.device is not device and (not src.block.owned or src.block.gaps is not None):
        src.device.wait(device.mark())
