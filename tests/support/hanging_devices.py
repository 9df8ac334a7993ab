"""Devices that hang, a clock that tests move, and the thread that looks at both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gradreduce.backends.sim import workers
from gradreduce.device import Device, Mesh, pending_calls, waiting

PATIENCE = 8.0  # seconds after which a test, not a mesh, is broken


class Clock:
    """What deadlines are counted by."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(pending_calls, "now", made)
    return made


def stall(device: Device, queue: str = "compute", after: int = 0) -> None:
    """From now on nothing in this queue of a simulated device runs, but its next entries."""
    device.scheduler.stall((device, queue), after)


def resume(device: Device, queue: str = "compute") -> None:
    device.scheduler.resume((device, queue))


def watchdogs() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "gradreduce-watchdog"]


def await_death(mesh: Mesh) -> str:
    """Until the watchdog has ended the mesh, and all that wait for it are woken; the reason."""
    assert mesh.mesh_state.failure_reported.wait(PATIENCE), "the mesh has not died"
    assert mesh.mesh_state.reason is not None
    return mesh.mesh_state.reason


@contextmanager
def no_thread_starts() -> Iterator[list[bool]]:
    """Inside, no thread can be started as soon as there is anything in the list."""
    refused: list[bool] = []

    def unless_refused(start: Callable[..., object]) -> Callable[..., object]:
        def started(*arguments: object) -> object:
            if refused:
                raise RuntimeError("can't start new thread")
            return start(*arguments)

        return started

    with pytest.MonkeyPatch.context() as patch:
        for place, name in (
            (threading.Thread, "start"),
            (waiting, "start_new_thread"),
            (workers, "start_new_thread"),
        ):
            patch.setattr(place, name, unless_refused(getattr(place, name)))
        yield refused
