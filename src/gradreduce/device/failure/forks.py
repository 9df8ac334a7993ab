"""Renews module-level state in a forked child process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# The number of forks between the first process and this one. Comparing process ids instead would
# cost a system call for every array, up to 1.5 us in a virtual machine.
forks = [0]


def _note_fork() -> None:
    forks[0] += 1


def after_fork(call: Callable[[], None]) -> None:
    """Calls ``call`` in every forked child."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
        os.register_at_fork(after_in_child=call)


after_fork(_note_fork)


class ModuleLock:
    """A module-level lock that is free in each forked child.

    Attributes:
        lock: a re-entrant lock. Use it by ``with``: Ctrl-C in a context manager written in Python
            could leave it held.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()


class cached_property(ModuleLock, functools.cached_property[T]):
    """``functools.cached_property``, with a lock that is free in each forked child.

    In Python 3.11 one lock serves all objects of the class. A fork while another thread computes
    the property would leave it held. Later versions have no lock.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        functools.cached_property.__init__(self, function)
        ModuleLock.__init__(self)
