"""What must be made again in a forked child process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

# How often this process came out of a fork. Asking for the process number instead is a system
# call, up to 1.5 us in a virtual machine, on the way of every array.
forks = [0]


def _forked() -> None:
    forks[0] += 1


def after_fork(call: Callable[[], None]) -> None:
    """Calls ``call`` in every forked child."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
        os.register_at_fork(after_in_child=call)


after_fork(_forked)


class ModuleLock:
    """A module-level lock that is free in a forked child, whoever held it before.

    Attributes:
        lock: re-entrant, for ``with``: Ctrl-C in a context manager of our own could leave it held.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()
