"""Waits and threads that stay consistent when Ctrl-C interrupts them.

``threading.Event`` and ``Thread.start`` are Python code: Ctrl-C inside them leaves their lock held.
Here each step is one C call.
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
        self._lock = Lock()  # held until the event is set
        self._lock.acquire()

    def is_set(self) -> bool:
        """See ``threading.Event``."""
        return self._is_set

    def set(self) -> None:
        """See ``threading.Event``; one thread at a time may call it."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Event``; ``timeout`` is at most ``threading.TIMEOUT_MAX``."""
        if not self._is_set and self._lock.acquire(timeout=-1 if timeout is None else timeout):
            self._lock.release()  # for the next thread that waits
        return self._is_set


class Waiters:
    """Threads that wait for a state protected by a lock; replaces ``Condition``."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: deque[SimpleQueue[None]] = deque()

    def until(
        self, ready: Callable[[], bool], rest: Callable[[], float | None] = lambda: None
    ) -> None:
        """Waits until ``ready()`` is true; ``ready`` is called with the lock held.

        It is called at first, after each ``notify``, and after ``rest()`` seconds. The caller must
        not hold the lock, which is free during the wait.
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

    def wake(self) -> None:
        """Like ``notify``, for a caller without the lock."""
        with self._lock:
            self.notify()


def call_under_lock(lock: Any, seconds: float, call: Callable[[], object]) -> bool:
    """Makes the call under the lock; returns False if the lock is not free in time."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (True,), (seconds,)))  # one C call takes and lists it
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

    If no thread can be started ("can't start new thread"), the calling thread runs ``otherwise``,
    by default the work itself.

    Returns:
        A ``Done`` that is set when the work has ended.
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
