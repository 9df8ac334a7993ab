"""The watchdog thread of a mesh: checks that calls finish before their deadline.

The thread polls marks and takes no lock of this package. Other threads pass it calls by
``SimpleQueue.put``, which is safe anywhere, also in a finalizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from weakref import ReferenceType, finalize, ref

from .pending_calls import PendingCall, names_of

if TYPE_CHECKING:
    from gradreduce.device.mesh_state import MeshState

# Seconds between two checks: short for new calls, longer for calls that take long.
_FIRST_LOOK, _LAST_LOOK = 1e-3, 20e-3
_Inbox = SimpleQueue[PendingCall | Callable[[], None] | None]


class Watchdog:
    """Starts the watchdog thread, which ends with its mesh."""

    def __init__(self, mesh_state: MeshState) -> None:
        self._inbox: _Inbox = SimpleQueue()
        self.thread = threading.Thread(
            target=_watch,
            args=(ref(mesh_state), self._inbox),
            name="gradreduce-watchdog",
            daemon=True,
        )
        self.thread.start()
        finalize(mesh_state, self._inbox.put, None).atexit = False

    def take(self, arrived: PendingCall | Callable[[], None]) -> None:
        """Starts to watch a call with a deadline; or calls a function once."""
        self._inbox.put(arrived)

    def end(self) -> None:
        """Ends the thread; does not wait for it."""
        self._inbox.put(None)


def _watch(mesh_state: ReferenceType[MeshState], inbox: _Inbox) -> None:
    """Runs the thread, which keeps the mesh alive only while a call is pending."""
    calls: list[PendingCall] = []
    pause = _FIRST_LOOK
    while True:
        try:
            rest = min([pause, *(pending.remaining for pending in calls)])
            arrived = inbox.get(timeout=max(0.0, rest) if calls else None)
        except Empty:
            pause = min(2 * pause, _LAST_LOOK)
        else:
            if arrived is None:
                return
            if isinstance(arrived, PendingCall):
                calls.append(arrived)
            else:
                arrived()
            del arrived
            pause = _FIRST_LOOK
        calls = _check_calls(mesh_state(), calls)


def _check_calls(mesh_state: MeshState | None, calls: list[PendingCall]) -> list[PendingCall]:
    """Returns the pending calls; fails the mesh if one is late or failed."""
    if mesh_state is None or mesh_state.reason is not None:
        return []
    reason = None
    try:
        ours = [pending for pending in calls if pending.generation == mesh_state.generation]
        calls = [pending for pending in ours if not pending.is_resolved]
        if calls:
            reason = (
                _library_failure(mesh_state, calls)
                or _failure(mesh_state, calls)
                or next(filter(None, (each.failure() for each in calls)), None)
                or _lateness(calls)
            )
    except Exception as error:  # of a driver: without this, the thread would end unnoticed
        reason = f"the devices cannot be queried: {error!r}"
    if reason is None:
        return calls
    mesh_state.fail(reason)
    return []


def _library_failure(mesh_state: MeshState, calls: list[PendingCall]) -> str | None:
    """Describes an error of the collective library, and the processes that are late."""
    error = mesh_state.library_error()
    late = error and _late_processes(calls, calls[0].seconds - calls[0].remaining)
    return f"{error}; {late}" if late else error


def _late_processes(calls: list[PendingCall], seconds: float) -> str | None:
    """Describes the processes for which the calls have waited for so many seconds."""
    asks = any([each.waits_for_others for each in calls])
    return calls[0].devices[0].mesh_state.processes.describe_late(seconds, asks=asks)


def _failure(mesh_state: MeshState, calls: list[PendingCall]) -> str | None:
    for pending in calls if mesh_state.failed else ():
        if pending.failed_devices():
            _progress(pending)  # lets the other devices finish as much as possible
        gone = pending.failed_devices()
        if gone:
            why = mesh_state.failed[gone[0].physical]
            stall = pending.describe_stall()
            return f"{names_of(gone)} failed ({why}) during {pending.call}: {stall}"
    return None


def _lateness(calls: list[PendingCall]) -> str | None:
    for pending in calls:
        if pending.remaining <= 0:
            _progress(pending)
            if not pending.is_resolved:
                return _describe(pending, calls)
    return None


def _progress(pending: PendingCall) -> None:
    for device in pending.devices:
        device._progress()


def _describe(pending: PendingCall, calls: list[PendingCall]) -> str:
    """Describes a late call, and the earlier one that it waits for."""
    oldest = next(each for each in calls if not each.is_resolved)
    stall = pending.describe_stall()
    text = f"the deadline of {pending.seconds:g} s for {pending.call} passed: {stall}"
    if oldest is not pending:
        text += f"; before it, in {oldest.call}: {oldest.describe_stall()}"
    late = _late_processes(calls, pending.seconds)
    if late:
        text += f"; {late}"
    return text
