"""How a mesh that died is made usable again; never waits for ever."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import TIMEOUT_MAX

from gradreduce.errors import CollectiveError

from .device import Device
from .pending_calls import as_deadline, names_of
from .waiting import held_in_time

__all__ = ["reset"]


def reset(devices: Sequence[Device], timeout: float | None) -> None:
    """See ``Mesh.reset``; these are all devices of the mesh."""
    seconds = as_deadline(timeout, "timeout")
    fabric = devices[0].fabric
    fabric.check_open()
    rest = _Rest(math.inf if seconds is None else time.monotonic() + seconds)

    def empty_queues() -> None:
        fabric.flight.drop(devices)  # before marks pass that nothing came to
        alive = [device for device in devices if device.physical not in fabric.lost]
        stuck = [device for device in alive if not device._abandon(rest.seconds)]
        rest.need(not stuck, f"queues have not come to their end: {names_of(stuck)}")

    def revive() -> None:
        if fabric.reason is None:
            return
        rest.need(fabric.mourned.wait(rest.seconds), "those who wait are not all woken")
        rest.need(fabric.library_ended(rest.seconds), "the communicators do not let go")
        busy = "a call is still giving work to the devices"
        rest.need(held_in_time(fabric.launch_lock, rest.seconds, empty_queues), busy)
        for kept, (_, empty) in fabric.listeners():
            empty(kept)
        fabric.revive()

    rest.need(held_in_time(fabric.reset_lock, rest.seconds, revive), "another thread resets it")


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
