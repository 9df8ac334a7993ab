"""In which order the queues of simulated devices run; never knows what the work is.

``RunAtOnce`` is the plain simulation: work runs in the call that gives it, so every mark has
passed. ``Shuffled`` is the adversary: work waits in its queue and runs later, in a seeded random
order among all that the waits allow, as late as the host's own waits allow. Code that forgot a
fence gives another result there under some seed, on a laptop.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Hashable

__all__ = ["Event", "RunAtOnce", "Scheduler", "Shuffled"]

Work = Callable[[], None]


class Event:
    """A place in a queue.

    Attributes:
        passed: whether the queue has run up to it.
    """

    __slots__ = ("passed",)

    def __init__(self, passed: bool = False) -> None:
        self.passed = passed


class Scheduler(ABC):
    """The queues of all devices of a mesh. A queue is named by any hashable key.

    Attributes:
        defers: whether work may still be waiting when ``submit`` returns.
    """

    defers: bool

    @abstractmethod
    def submit(self, queue: Hashable, work: Work) -> None:
        """Puts work at the end of a queue."""

    @abstractmethod
    def record(self, queue: Hashable) -> Event:
        """Marks the end of a queue."""

    @abstractmethod
    def wait(self, queue: Hashable, event: Event) -> None:
        """What comes into the queue from now on runs after ``event``."""

    @abstractmethod
    def finish(self, queue: Hashable) -> None:
        """Returns when the queue is empty; only this makes the host wait."""


class RunAtOnce(Scheduler):
    """Work runs when it is given, in the thread that gives it, one at a time in each queue."""

    defers = False
    _passed = Event(passed=True)

    def __init__(self) -> None:
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)

    def submit(self, queue: Hashable, work: Work) -> None:
        """See ``Scheduler.submit``."""
        with self._locks[queue]:
            work()

    def record(self, queue: Hashable) -> Event:
        """See ``Scheduler.record``."""
        return self._passed

    def wait(self, queue: Hashable, event: Event) -> None:
        """See ``Scheduler.wait``."""

    def finish(self, queue: Hashable) -> None:
        """See ``Scheduler.finish``."""


class Shuffled(Scheduler):
    """Work runs in a random legal order.

    Args:
        seed: of the order. Seed 0 is fully lazy: nothing runs before the host waits. Seed 1 is
            eager: after each call everything that can run does. Others mix, each with its own
            inclination to run early.
    """

    defers = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._early = {0: 0.0, 1: 1.0}.get(seed, self._random.choice((0.1, 0.3, 0.5, 0.8)))
        self._queues: dict[Hashable, deque[Work | Event]] = {}
        # Re-entrant: work never submits work, but a dying block may be drained inside a call.
        self._lock = threading.RLock()

    def submit(self, queue: Hashable, work: Work) -> None:
        """See ``Scheduler.submit``."""
        with self._lock:
            self._queues.setdefault(queue, deque()).append(work)
            self._run_some()

    def record(self, queue: Hashable) -> Event:
        """See ``Scheduler.record``."""
        event = Event()

        def passed() -> None:
            event.passed = True

        self.submit(queue, passed)
        return event

    def wait(self, queue: Hashable, event: Event) -> None:
        """See ``Scheduler.wait``."""
        with self._lock:
            self._queues.setdefault(queue, deque()).append(event)

    def finish(self, queue: Hashable) -> None:
        """See ``Scheduler.finish``.

        Raises:
            RuntimeError: the queue waits for an event that no queue will pass.
        """
        with self._lock:
            while self._queues.get(queue):
                if not self._run_one():
                    raise RuntimeError(f"deadlock: {queue} waits for an event that never passes")

    def _run_some(self) -> None:
        while self._random.random() < self._early and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Runs the head of a random queue that can go on; False if none can."""
        ready = [line for line in self._queues.values() if self._can_run(line)]
        if not ready:
            return False
        line = self._random.choice(ready)
        work = line.popleft()
        if not isinstance(work, Event):
            work()
        return True

    @staticmethod
    def _can_run(line: deque[Work | Event]) -> bool:
        if not line:
            return False
        head = line[0]
        return head.passed if isinstance(head, Event) else True
