"""Makes a failed mesh usable again."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import TIMEOUT_MAX

from gradreduce.errors import CollectiveError

from .device import Device
from .failure.pending_calls import as_deadline, names_of
from .failure.waiting import call_under_lock


def reset(devices: Sequence[Device], timeout: float | None) -> None:
    """See ``Mesh.reset``; ``devices`` are all devices of the mesh."""
    seconds = as_deadline(timeout, "timeout")
    mesh_state = devices[0].mesh_state
    mesh_state.check_open()
    if mesh_state.processes.size > 1 and mesh_state.reason is not None:
        raise CollectiveError(
            "a mesh over several processes cannot be reset: end the processes and start them "
            f"again; it has failed: {mesh_state.reason}"
        )
    end = math.inf if seconds is None else time.monotonic() + seconds

    def rest() -> float:
        return min(max(0.0, end - time.monotonic()), TIMEOUT_MAX)

    def empty_queues() -> None:
        mesh_state.log.drop()  # before marks pass whose work was not done
        alive = [device for device in devices if device.physical not in mesh_state.failed]
        stuck = [device for device in alive if not device._abandon(rest())]
        _need(not stuck, f"these queues have not finished: {names_of(stuck)}")

    def clear_failure() -> None:
        if mesh_state.reason is None:
            return
        _need(mesh_state.failure_reported.wait(rest()), "some waiting threads have not returned")
        _need(mesh_state.library_finished(rest()), "the communicators are not aborted yet")
        submits = "a call is still submitting work to the devices"

        def drain() -> None:  # a thread may hang in the driver, and hold only this lock
            _need(call_under_lock(mesh_state.order.lock, rest(), empty_queues), submits)

        _need(call_under_lock(mesh_state.launch_lock, rest(), drain), submits)
        for kept, (_, empty) in mesh_state.listeners():
            empty(kept)
        mesh_state.clear_failure()

    _need(
        call_under_lock(mesh_state.reset_lock, rest(), clear_failure),
        "another thread is resetting it",
    )


def _need(done: bool, what: str) -> None:
    if not done:
        raise CollectiveError(
            f"the mesh cannot be reset yet: {what}; reset it again later, or end the process"
        )
