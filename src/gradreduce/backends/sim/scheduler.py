"""Schedulers of the queues of simulated devices.

``Scheduler`` runs work in the call that submits it. ``RandomScheduler`` runs it later, in a seeded
random order that the waits allow. If a wait is missing, the result is wrong for some seed.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any

from gradreduce.device import DeferInterrupts, Waiters, WaitPolicy, call_under_lock

QueuedWork = Callable[[], None]
# How long the watchdog waits for the lock.
_PROGRESS_SECONDS = 1.0


class SimEvent:
    """A position in a queue.

    Attributes:
        done: whether the queue has run up to it.
    """

    __slots__ = ("done",)

    def __init__(self, done: bool = False) -> None:
        self.done = done


_PASSED = SimEvent(done=True)
# An entry of a queue: ("work", a function), ("record", an event), or ("wait", an event).
_Entry = tuple[str, Any]


class Scheduler:
    """Runs the queues of all devices of a mesh; any hashable key names a queue.

    This class runs work when it is submitted, in the same thread, one at a time per queue. Work of
    a signal handler runs during the work that the handler has interrupted.

    Attributes:
        defers: whether work may still be waiting when ``submit`` returns.
    """

    defers = False

    def __init__(self) -> None:
        self._locks: defaultdict[Hashable, threading.RLock] = defaultdict(threading.RLock)

    def submit(self, queue: Hashable, work: QueuedWork) -> None:
        """Appends work to a queue."""
        with self._locks[queue]:
            work()

    def record(self, queue: Hashable) -> SimEvent:
        """Marks the end of a queue."""
        return _PASSED

    def wait(self, queue: Hashable, event: SimEvent) -> None:
        """Makes later work of the queue run after ``event``."""

    def finish(self, queue: Hashable, wait_policy: WaitPolicy | None = None) -> bool:
        """Waits on the host until the queue is empty.

        Returns:
            False if ``wait_policy`` ended the wait early, or the work was dropped.
        """
        return True

    def progress(self) -> None:
        """Runs work that can run without a host wait, as a GPU does."""

    def is_waiting(self, queue: Hashable) -> bool:
        """Whether a queue waits for an event that has not passed."""
        return False

    def drop(self) -> None:
        """Drops work that has not run; all its marks count as passed."""

    def wake(self) -> None:
        """Makes threads that wait in ``finish`` check their wait policy."""


class RandomScheduler(Scheduler):
    """Runs queued work in a random order that the waits allow.

    ``stall`` makes a queue hang, like a GPU whose kernel never ends.

    Args:
        seed: the seed of the order. Seed 0 is lazy: nothing runs before the host waits. Seed 1 is
            eager: each call runs all work that can run. Other seeds run some work early, each with
            its own probability.
    """

    defers = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # an order, not a secret
        self._early = {0: 0.0, 1: 1.0}.get(seed, self._random.choice((0.1, 0.3, 0.5, 0.8)))
        self._queues: dict[Hashable, deque[_Entry]] = {}
        self._stalled: dict[Hashable, int] = {}  # queue -> number of entries that it may still run
        self._drops = 0
        self._runs = False  # whether work is being chosen or run
        # Re-entrant: a freed block may be drained inside a call.
        self._lock = threading.RLock()
        self._waiters = Waiters(self._lock)

    def submit(self, queue: Hashable, work: QueuedWork) -> None:
        """See ``Scheduler.submit``."""
        self._append(queue, ("work", work))

    def record(self, queue: Hashable) -> SimEvent:
        """See ``Scheduler.record``."""
        event = SimEvent()
        self._append(queue, ("record", event))
        return event

    def wait(self, queue: Hashable, event: SimEvent) -> None:
        """See ``Scheduler.wait``."""
        self._append(queue, ("wait", event))

    def _append(self, queue: Hashable, entry: _Entry) -> None:
        with self._lock:
            self._queues.setdefault(queue, deque()).append(entry)
            self._run_some()

    def finish(self, queue: Hashable, wait_policy: WaitPolicy | None = None) -> bool:
        """See ``Scheduler.finish``; also waits for a stalled queue.

        Raises:
            RuntimeError: the queue waits for an event that no queue will pass, or a signal handler
                waits for work that it has interrupted.
        """
        drops, late = self._drops, []

        def over() -> bool:
            while self._queues.get(queue) and self._run_one():
                pass
            if not self._queues.get(queue):
                return True
            if self._runs:
                raise RuntimeError(
                    "a signal handler waits for queued work (schedule_seed=) that it has "
                    "interrupted: let the handler set a flag, and do this after the call"
                )
            if not self._stalled:
                raise RuntimeError(f"deadlock: {queue} waits for an event that never passes")
            if wait_policy is not None and wait_policy.is_over:
                late.append(True)
            return bool(late)

        self._waiters.until(over, lambda: None if wait_policy is None else wait_policy.remaining)
        return not late and drops == self._drops

    def stall(self, queue: Hashable, after: int = 0) -> None:
        """Stalls a queue after its next ``after`` entries, waits included."""
        with self._lock:
            self._stalled[queue] = after

    def resume(self, queue: Hashable) -> None:
        """Lets a stalled queue run again."""
        with self._lock:
            self._stalled.pop(queue, None)
            self._run_some()
            self._waiters.notify()

    def progress(self) -> None:
        """See ``Scheduler.progress``; returns early if another thread holds the lock too long."""

        def run() -> None:
            while self._run_one():
                pass

        call_under_lock(self._lock, _PROGRESS_SECONDS, run)

    def is_waiting(self, queue: Hashable) -> bool:
        """See ``Scheduler.is_waiting``; False if another thread holds the lock too long."""
        answer: list[bool] = []

        def look() -> None:
            pending = self._queues.get(queue, deque())
            answer.append(len(pending) > 0 and not self._can_run(pending))

        call_under_lock(self._lock, _PROGRESS_SECONDS, look)
        return True in answer

    def drop(self) -> None:
        """See ``Scheduler.drop``; no queue is stalled afterwards."""
        with self._lock:
            self._drops += 1
            for pending in self._queues.values():
                for kind, item in pending:
                    if kind == "record":
                        item.done = True
                pending.clear()
            self._stalled.clear()
            self._waiters.notify()

    def wake(self) -> None:
        """See ``Scheduler.wake``."""
        with self._lock:
            self._waiters.notify()

    def _run_some(self) -> None:
        while self._random.random() < self._early and self._run_one():
            pass

    def _run_one(self) -> bool:
        """Runs the first entry of a random ready queue; False if none is ready.

        Ctrl-C does not interrupt the entry, and entries do not nest: work of a device is not
        affected by interrupts of the host.
        """
        if self._runs:
            return False
        self._runs = True  # from here on a signal handler runs no work
        try:
            ready = [
                queue
                for queue, pending in list(self._queues.items())  # a signal handler may add one
                if self._can_run(pending) and self._stalled.get(queue, 1)
            ]
            if not ready:
                return False
            queue = self._random.choice(ready)
            with DeferInterrupts():
                if queue in self._stalled:
                    self._stalled[queue] -= 1
                kind, item = self._queues[queue].popleft()
                if kind == "work":
                    item()
                elif kind == "record":
                    item.done = True
        finally:
            self._runs = False
        return True

    @staticmethod
    def _can_run(pending: deque[_Entry]) -> bool:
        if not pending:
            return False
        kind, item = pending[0]
        return kind != "wait" or bool(item.done)
