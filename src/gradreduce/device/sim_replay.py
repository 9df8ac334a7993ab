"""What a capture of simulated devices keeps: a list of what queues were given; a CUDA graph's twin.

Like a graph it knows no order but its own: a play begins where the queue that it is given to is,
and ends there, in queues that nobody else uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from gradreduce.errors import CaptureError

from .capture import Recording
from .sim_queue import Event, Scheduler, Work
from .tape import Issue

__all__ = ["Replay"]


class Replay(Recording):
    """Kept work.

    Args:
        scheduler: that plays it.
        origin: the queue that a play is given to.
    """

    def __init__(self, scheduler: Scheduler, origin: Hashable) -> None:
        self._scheduler = scheduler
        self._origin = origin
        self._entries: list[tuple[Hashable, Work | None, Event | None]] = []
        self._made: dict[int, Event] = {}  # kept alive, so that no other has its id
        self._own: dict[Hashable, Hashable] = {}  # a device's queue -> ours in its place

    def begin(self) -> None:
        """See ``Recording.begin``."""

    def abandon(self) -> None:
        """See ``Recording.abandon``: nobody can play it."""

    def end(self) -> Issue:
        """See ``Recording.end``."""
        weakref.finalize(self, _forget, self._scheduler, tuple(self._own.values()))
        return self._play

    def submit(self, queue: Hashable, work: Work) -> None:
        """Keeps work at the end of a queue."""
        self._entries.append((self._ours(queue), work, None))

    def record(self, queue: Hashable) -> Event:
        """Keeps a mark of the end of a queue."""
        event = Event()
        self._made[id(event)] = event
        self._entries.append((self._ours(queue), None, event))
        return event

    def wait(self, queue: Hashable, event: Event) -> None:
        """Keeps a wait.

        Raises:
            CaptureError: for an event that was not made inside; CUDA refuses it too.
        """
        if id(event) not in self._made:
            raise CaptureError(f"{queue} waits for an event that the capture did not record")
        self._entries.append((self._ours(queue), event_wait, event))

    def _ours(self, queue: Hashable) -> Hashable:
        # Where work runs at once a queue is a lock and nothing else: the device's own will do.
        made = ("captured", object(), queue) if self._scheduler.defers else queue
        return self._own.setdefault(queue, made)

    def _play(self) -> None:
        scheduler, origin = self._scheduler, self._origin
        begun = scheduler.record(origin)
        for queue in self._own.values():
            scheduler.wait(queue, begun)
        passed: dict[int, Event] = {}
        for queue, work, event in self._entries:
            if event is None:
                assert work is not None
                scheduler.submit(queue, work)
            elif work is None:
                passed[id(event)] = scheduler.record(queue)
            else:
                scheduler.wait(queue, passed[id(event)])
        for queue in self._own.values():
            scheduler.wait(origin, scheduler.record(queue))


def event_wait() -> None:
    """Stands for the work of a wait, which has none."""


def _forget(scheduler: Scheduler, queues: tuple[Hashable, ...]) -> None:
    for queue in queues:
        scheduler.forget(queue)
