"""The one thread of a mesh that looks whether calls with a deadline come to their end.

It polls marks and takes no lock of ours; nor does whoever hands it something, or ends it, which
may be a collected mesh: ``SimpleQueue.put`` may be called anywhere, by the collector too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from weakref import ReferenceType, finalize, ref

from .pending_calls import Watch, names_of

if TYPE_CHECKING:
    from .mesh_state import Fabric

__all__ = ["Watchdog"]

# Between two looks: what is over soon is let go soon, and what takes long is not looked at often.
_FIRST_LOOK, _LAST_LOOK = 1e-3, 20e-3
_Inbox = SimpleQueue[Watch | Callable[[], None] | None]


class Watchdog:
    """Starts the thread; it ends with its mesh, which it never keeps alive while idle."""

    def __init__(self, fabric: Fabric) -> None:
        self._inbox: _Inbox = SimpleQueue()
        self.thread = threading.Thread(
            target=_watch,
            args=(ref(fabric), self._inbox),
            name="gradreduce-watchdog",
            daemon=True,
        )
        self.thread.start()
        finalize(fabric, self._inbox.put, None).atexit = False

    def take(self, arrived: Watch | Callable[[], None]) -> None:
        """Looks at a call with a deadline from now on; or calls it, once."""
        self._inbox.put(arrived)

    def end(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._inbox.put(None)


def _watch(fabric: ReferenceType[Fabric], inbox: _Inbox) -> None:
    """The thread. Its variables hold a call, and with it the mesh, only while that is open."""
    watches: list[Watch] = []
    pause = _FIRST_LOOK
    while True:
        try:
            arrived = inbox.get(timeout=_rest(watches, pause) if watches else None)
        except Empty:
            pause = min(2 * pause, _LAST_LOOK)
        else:
            if arrived is None:
                return
            if isinstance(arrived, Watch):
                watches.append(arrived)
            else:
                arrived()
            del arrived
            pause = _FIRST_LOOK
        watches = _looked_at(fabric(), watches)


def _rest(watches: list[Watch], pause: float) -> float:
    return max(0.0, min(pause, *(watch.rest for watch in watches)))


def _looked_at(fabric: Fabric | None, watches: list[Watch]) -> list[Watch]:
    """Those that are still open; the first that is late, lost or broken ends the mesh."""
    if fabric is None or fabric.reason is not None:
        return []
    try:
        return _judged(fabric, watches)
    except Exception as error:  # of a driver: nobody would look any more, and nobody know
        fabric.fail(f"the devices cannot be looked at: {error!r}")
        return []


def _judged(fabric: Fabric, watches: list[Watch]) -> list[Watch]:
    ours = [watch for watch in watches if watch.generation == fabric.generation]
    open_ones = [watch for watch in ours if not watch.settled]
    checks: tuple[Callable[[], str | None], ...] = (
        fabric.library_error,
        lambda: _loss(fabric, open_ones),
        lambda: _lateness(open_ones),
    )
    for check in checks if open_ones else ():
        reason = check()
        if reason is not None:
            fabric.fail(reason)
            return []
    return open_ones


def _loss(fabric: Fabric, watches: list[Watch]) -> str | None:
    if not fabric.lost:
        return None
    for watch in watches:
        if watch.casualties():
            _urge(watch)  # what the others can still do tells them from it
        gone = watch.casualties()
        if gone:
            why = fabric.lost[gone[0].physical]
            return f"{names_of(gone)} was lost ({why}) during {watch.call}: {watch.blame()}"
    return None


def _lateness(watches: list[Watch]) -> str | None:
    for watch in watches:
        if watch.rest <= 0:
            _urge(watch)
            if not watch.settled:
                return _told(watch, next(each for each in watches if not each.settled))
    return None


def _urge(watch: Watch) -> None:
    for device in watch.devices:
        device._urge()


def _told(watch: Watch, oldest: Watch) -> str:
    """What is said of a call that is late; it may only stand behind an earlier one that is not."""
    text = f"the deadline of {watch.seconds:g} s for {watch.call} passed: {watch.blame()}"
    if oldest is not watch:
        text += f"; before it, in {oldest.call}: {oldest.blame()}"
    return text
