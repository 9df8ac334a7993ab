"""How a mesh that died is made usable again; never waits for ever."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import TIMEOUT_MAX
from typing import Any

from gradreduce.errors import CollectiveError

from .base import Device
from .watch import as_deadline, names_of

__all__ = ["reset"]


def reset(devices: Sequence[Device], timeout: float | None) -> None:
    """See ``Mesh.reset``; these are all devices of the mesh."""
    seconds = as_deadline(timeout, "timeout")
    fabric = devices[0].fabric
    fabric.check_open()
    rest = _Rest(math.inf if seconds is None else time.monotonic() + seconds)
    with rest.held(fabric.reset_lock, "another thread resets it"):
        if fabric.reason is None:
            return
        rest.need(fabric.mourned.wait(rest.seconds), "those who wait are not all woken")
        rest.need(fabric.library_ended(rest.seconds), "the communicators do not let go")
        with rest.held(fabric.launch_lock, "a call is still giving work to the devices"):
            fabric.flight.drop(devices)  # before marks pass that nothing came to
            alive = [device for device in devices if device.physical not in fabric.lost]
            stuck = [device for device in alive if not device._abandon(rest.seconds)]
            rest.need(not stuck, f"queues have not come to their end: {names_of(stuck)}")
        for kept, empty in list(fabric.on_reset.items()):
            empty(kept)
        fabric.revive()


class _Rest:
    """The time that is left."""

    def __init__(self, end: float) -> None:
        self._end = end

    @property
    def seconds(self) -> float:
        return min(max(0.0, self._end - time.monotonic()), TIMEOUT_MAX)

    def need(self, done: bool, what: str) -> None:
        if not done:
            raise CollectiveError(
                f"the mesh is still dead: {what}; reset it again later, or end the process"
            )

    @contextmanager
    def held(self, lock: Any, otherwise: str) -> Iterator[None]:
        self.need(lock.acquire(timeout=self.seconds), otherwise)
        try:
            yield
        finally:
            lock.release()
