"""Makes a failed mesh usable again."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import TIMEOUT_MAX

from gradreduce.errors import CollectiveError

from .device import Device
from .pending_calls import as_deadline, names_of
from .waiting import acquired_in_time


def reset(devices: Sequence[Device], timeout: float | None) -> None:
    """See ``Mesh.reset``; ``devices`` are all devices of the mesh."""
    seconds = as_deadline(timeout, "timeout")
    mesh_state = devices[0].mesh_state
    mesh_state.check_open()
    rest = _Rest(math.inf if seconds is None else time.monotonic() + seconds)

    def empty_queues() -> None:
        mesh_state.log.drop()  # before marks pass that nothing came to
        alive = [device for device in devices if device.physical not in mesh_state.failed]
        stuck = [device for device in alive if not device._abandon(rest.seconds)]
        rest.need(not stuck, f"these queues have not finished: {names_of(stuck)}")

    def clear_failure() -> None:
        if mesh_state.reason is None:
            return
        rest.need(
            mesh_state.failure_reported.wait(rest.seconds), "some waiting threads have not returned"
        )
        rest.need(
            mesh_state.library_finished(rest.seconds), "the communicators are not aborted yet"
        )
        busy = "a call is still submitting work to the devices"
        rest.need(acquired_in_time(mesh_state.launch_lock, rest.seconds, empty_queues), busy)
        for kept, (_, empty) in mesh_state.listeners():
            empty(kept)
        mesh_state.clear_failure()

    rest.need(
        acquired_in_time(mesh_state.reset_lock, rest.seconds, clear_failure),
        "another thread is resetting it",
    )


class _Rest:
    """The time that is left until the timeout."""

    def __init__(self, end: float) -> None:
        self._end = end

    @property
    def seconds(self) -> float:
        return min(max(0.0, self._end - time.monotonic()), TIMEOUT_MAX)

    def need(self, done: bool, what: str) -> None:
        if not done:
            raise CollectiveError(
                f"the mesh cannot be reset yet: {what}; reset it again later, or end the process"
            )
