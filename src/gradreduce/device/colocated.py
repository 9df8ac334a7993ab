"""Logical devices that share a physical one, and how one of them works for several.

Co-located devices share launches: one of them, the leader, launches for all. It says ``gather``
before, so that its queue comes behind theirs, and ``scatter`` after, so that theirs come behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .base import Device
from .memory import Buffer, Queue
from .reach import check_reach, reaches

__all__ = ["bring", "by_physical", "gather", "gather_all", "pull", "scatter"]


def by_physical(devices: Sequence[Device]) -> dict[int, tuple[int, ...]]:
    """Physical device -> the places in ``devices`` of its logical ones; first seen first."""
    places: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device.physical, []).append(place)
    return {physical: tuple(found) for physical, found in places.items()}


def gather(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """What the leader's queue is given from now on comes behind what the others hold so far.

    Say it after the last allocation: memory comes in the order of its device's compute queue.
    """
    gather_all([leader], others, queue)


def gather_all(leaders: Iterable[Device], others: Iterable[Device], queue: Queue) -> None:
    """As ``gather`` for several leaders, with one mark of each of the others for all of them."""
    leaders = list(dict.fromkeys(leaders))
    for other in dict.fromkeys(others):
        behind = [each for each in leaders if each is not other or queue != "compute"]
        if behind:
            mark = other.mark()
            for leader in behind:
                leader.wait(mark, queue=queue)


def scatter(leader: Device, others: Iterable[Device], queue: Queue = "compute") -> None:
    """What the others launch from now on comes behind what the leader's queue holds so far."""
    waiting = [
        other for other in dict.fromkeys(others) if other is not leader or queue != "compute"
    ]
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
    if reaches(device, buffer):
        check_reach(device, buffer)
        return buffer
    return pull(device, buffer, queue)


def pull(device: Device, buffer: Buffer, queue: Queue = "compute") -> Buffer:
    """As ``bring``, but only co-located memory is left where it is: a peer's is copied."""
    if buffer.device.physical == device.physical:
        return buffer
    copied = device.empty(buffer.shape, buffer.dtype)
    device.copy(copied, buffer, queue=queue)
    return copied
