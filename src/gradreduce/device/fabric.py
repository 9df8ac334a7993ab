"""What the devices of one mesh share; never does work itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gradreduce.errors import BackendUnavailableError

from .journal import Recorder
from .tape import Tape

if TYPE_CHECKING:
    from .base import Device

__all__ = ["Fabric"]

# How often this process came out of a fork. Asking for the process number instead is a system
# call, up to 1.5 us in a virtual machine, on the way of every array.
_forks = [0]


def _forked() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forked)


class _Issued(threading.local):
    """How many launches and copies a thread has given to the devices, and its open tape."""

    count: int = 0
    tape: Tape | None = None


class Fabric:
    """What the devices of one mesh share: the links between them, the journal, being open.

    Attributes:
        backend: ``"sim"`` or ``"cuda"``.
        peer_access: for all pairs of physical devices or none, or the pairs that have it; see
            ``peers``.
        prepared: what was compiled for its devices, so that nobody asks twice.
        on_close: what to call, with the key, when the mesh is closed or one of the key's
            ``devices`` is lost: who waits for work on them would wait for ever.
        recorder: where devices write what they did.
        launch_lock: held around each collective group and each multi-device plan, so that every
            device sees those of all threads in one order.
        lost: physical devices that are of no more use, and why.
        last_read: another object after each copy that a writer must wait for.
    """

    def __init__(self, backend: str, *, peer_access: bool | set[tuple[int, int]]) -> None:
        self.backend = backend
        self.recorder = Recorder()
        self.prepared: set[Hashable] = set()
        self.on_close: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
        self.launch_lock = threading.RLock()
        self.lost: dict[int, str] = {}
        self.last_read = object()
        self._issued = _Issued()
        self.peer_access = peer_access
        self._closed = False
        self._pid = os.getpid()
        self._forks = _forks[0]

    def peers(self, physical: int, other: int) -> bool:
        """Whether a launch on one physical device may touch the memory of the other."""
        if physical == other:
            return True
        if isinstance(self.peer_access, bool):
            return self.peer_access
        return (physical, other) in self.peer_access

    def close(self) -> None:
        """Makes every later use of its devices an error."""
        self._closed = True
        self._wake(None)

    def lose(self, physical: int, reason: str) -> None:
        """Makes every later use of a physical device an error that gives the first reason.

        Who waits for work on it is woken, by a thread of its own: whoever meets a fault may hold
        the locks that waking takes.
        """
        if physical in self.lost:
            return
        self.lost[physical] = reason
        worker = threading.Thread(
            target=self._wake, args=(physical,), name="gradreduce-lost", daemon=True
        )
        worker.start()

    @property
    def tape(self) -> Tape | None:
        """Where this thread keeps what it gives to the devices; None: nowhere."""
        return self._issued.tape

    @property
    def watched(self) -> bool:
        """Whether anybody wants to know what this thread gives to the devices."""
        return self.recorder.recording or self._issued.tape is not None

    @contextmanager
    def taped(self, tape: Tape | None) -> Iterator[None]:
        """Inside, this thread keeps what it does on ``tape``; nowhere with None."""
        before, self._issued.tape = self._issued.tape, tape
        try:
            yield
        finally:
            self._issued.tape = before

    def issued(self) -> None:
        """Counts a launch or copy of this thread, for ``whole_or_lost``."""
        self._issued.count += 1

    @contextmanager
    def whole_or_lost(self, devices: Iterable[Device]) -> Iterator[None]:
        """For work that writes state in place: all of it is given to the devices, or they are lost.

        A failure before this thread's first launch or copy inside changed nothing and loses
        nothing. After it the state is half of the old and half of the new, and nobody may use it.
        """
        before = self._issued.count
        try:
            yield
        except BaseException as error:
            if self._issued.count != before:
                found = list(dict.fromkeys(devices))
                names = ", ".join(device.name for device in found)
                for device in found:
                    self.lose(device.physical, f"a call failed half way: {error!r}")
                error.add_note(f"This came half way through: {names} cannot be used any more.")
            raise

    def _wake(self, physical: int | None) -> None:
        """Wakes those who wait for one physical device, or (None) all."""
        for waiting, wake in list(self.on_close.items()):
            if physical is None or any(each.physical == physical for each in waiting.devices):
                wake(waiting)

    def check_usable(self, device: Device) -> None:
        """Raises ``BackendUnavailableError`` for a lost device, and what ``check_open`` raises."""
        self.check_open()
        if self.lost and device.physical in self.lost:
            raise BackendUnavailableError(
                f"device {device.name} was lost: {self.lost[device.physical]}"
            )

    def check_open(self) -> None:
        """Raises ``BackendUnavailableError`` for a closed mesh, or one from before a fork."""
        if self._closed:
            raise BackendUnavailableError(f"the mesh of this {self.backend} device was closed")
        if self._forks != _forks[0]:
            raise BackendUnavailableError(
                f"this {self.backend} device was opened by process {self._pid}, before a fork; "
                "open a mesh in the new process"
            )
