"""Waits, and threads for work that may block, which a signal handler finds done or not done.

``threading.Event`` and ``Thread.start`` are Python code: Ctrl-C in the middle of one leaves its
inner lock held. Here one C call makes each step.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

__all__ = ["Done", "Waiters", "acquired_in_time", "run_in_thread"]


class Done:
    """As a ``threading.Event`` that is never cleared, for one thread that waits at a time."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = Lock()  # held until it is set
        self._lock.acquire()

    def is_set(self) -> bool:
        """See ``threading.Event``."""
        return self._is_set

    def set(self) -> None:
        """See ``threading.Event``; by one thread at a time."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Event``; ``timeout`` is at most ``threading.TIMEOUT_MAX``."""
        if not self._is_set and self._lock.acquire(timeout=-1 if timeout is None else timeout):
            self._lock.release()  # for the next who waits
        return self._is_set


class Waiters:
    """Those who wait for what a lock guards to become something; in place of a ``Condition``."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: deque[SimpleQueue[None]] = deque()

    def until(
        self, ready: Callable[[], bool], rest: Callable[[], float | None] = lambda: None
    ) -> None:
        """Returns when ``ready()``, which is asked, and may change it, while the lock is held.

        It is asked at first, after each ``notify`` and after ``rest()`` seconds. The caller must
        not hold the lock: while it waits nobody holds it.
        """
        while True:
            with self._lock:
                if ready():
                    return
                news: SimpleQueue[None] = SimpleQueue()
                self._waiters.append(news)
            with suppress(Empty):
                news.get(timeout=rest())

    def notify(self) -> None:
        """Has them ask again; the lock must be held."""
        while self._waiters:
            self._waiters.popleft().put(None)


def acquired_in_time(lock: Any, seconds: float, call: Callable[[], object]) -> bool:
    """Calls it while the lock is held, if that is free within so many seconds; whether it was."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (True,), (seconds,)))  # taken and listed, or neither
        if True in taken:
            call()
        return True in taken
    finally:
        if True in taken:
            lock.release()


def run_in_thread(
    work: Callable[[], object], otherwise: Callable[[], object] | None = None
) -> Done:
    """Has work that may block done by a thread of its own, which the process does not wait for.

    Where no thread can be started ("can't start new thread") the calling one does ``otherwise``,
    by default the work.

    Returns:
        Set when the work has ended.
    """
    done = Done()

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    try:
        start_new_thread(run, ())
    except RuntimeError:
        (otherwise or run)()
    return done
