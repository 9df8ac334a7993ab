"""Renews module-level state in a forked child process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

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
