"""What the devices of one mesh share; never does work itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from gradreduce.errors import BackendUnavailableError

from .journal import Recorder

__all__ = ["Fabric"]

# How often this process came out of a fork. Asking for the process number instead is a system
# call, up to 1.5 us in a virtual machine, on the way of every array.
_forks = [0]


def _forked() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forked)


class Fabric:
    """What the devices of one mesh share: the links between them, the journal, being open.

    Attributes:
        backend: ``"sim"`` or ``"cuda"``.
        prepared: what was compiled for its devices, so that nobody asks twice.
        on_close: what to call, with the key, when the mesh is closed: who waits for work on its
            devices would wait for ever.
        recorder: where devices write what they did.
        launch_lock: held around each collective group and each multi-device plan, so that every
            device sees those of all threads in one order.
    """

    def __init__(self, backend: str, *, peer_access: bool | set[tuple[int, int]]) -> None:
        self.backend = backend
        self.recorder = Recorder()
        self.prepared: set[Hashable] = set()
        self.on_close: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
        self.launch_lock = threading.RLock()
        self._peer_access = peer_access
        self._closed = False
        self._pid = os.getpid()
        self._forks = _forks[0]

    def peers(self, physical: int, other: int) -> bool:
        """Whether a launch on one physical device may touch the memory of the other."""
        if physical == other:
            return True
        if isinstance(self._peer_access, bool):
            return self._peer_access
        return (physical, other) in self._peer_access

    def close(self) -> None:
        """Makes every later use of its devices an error."""
        self._closed = True
        for waiting, wake in list(self.on_close.items()):
            wake(waiting)

    def check_open(self) -> None:
        """Raises ``BackendUnavailableError`` for a closed mesh, or one from before a fork."""
        if self._closed:
            raise BackendUnavailableError(f"the mesh of this {self.backend} device was closed")
        if self._forks != _forks[0]:
            raise BackendUnavailableError(
                f"this {self.backend} device was opened by process {self._pid}, before a fork; "
                "open a mesh in the new process"
            )
