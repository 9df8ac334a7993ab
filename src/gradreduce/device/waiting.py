"""Waits and threads that stay consistent when a signal handler interrupts them.

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


class Done:
    """A ``threading.Event`` that is set once, for one waiting thread at a time."""

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
    """Threads that wait for state that a lock guards; replaces ``Condition``."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: deque[SimpleQueue[None]] = deque()

    def until(
        self, ready: Callable[[], bool], rest: Callable[[], float | None] = lambda: None
    ) -> None:
        """Waits until ``ready()`` is true; it is called with the lock held.

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
        """Makes waiting threads check again; the lock must be held."""
        while self._waiters:
            self._waiters.popleft().put(None)


def acquired_in_time(lock: Any, seconds: float, call: Callable[[], object]) -> bool:
    """Makes the call under the lock, if it is free in time; returns whether it was."""
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
    """Runs work that may block in a daemon thread.

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
