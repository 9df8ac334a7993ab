"""Devices that hang, a clock that tests advance, and waiting for the watchdog."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gradreduce.backends.sim import workers
from gradreduce.device import Device, Mesh
from gradreduce.device.failure import pending_calls, waiting
from gradreduce.device.log import op_log

TEST_TIMEOUT = 30.0  # seconds; a test that waits longer fails


class Clock:
    """Replaces the clock of deadlines."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(pending_calls, "now", made)
    return made


@pytest.fixture
def late_waits(clock, monkeypatch) -> None:
    """A deadline passes when the host begins to wait for a device that hangs.

    Until then the clock stands still, however long the call takes to submit its work. The search
    for late queues takes as long as it needs, in the thread that searches.
    """
    remaining = pending_calls.WaitPolicy.remaining.fget

    def a_minute_later(wait_policy: pending_calls.WaitPolicy) -> float | None:
        clock.advance(60)
        return remaining(wait_policy)

    def run_here(work: Callable[[], object]) -> waiting.Done:
        work()
        done = waiting.Done()
        done.set()
        return done

    monkeypatch.setattr(pending_calls.WaitPolicy, "remaining", property(a_minute_later))
    monkeypatch.setattr(op_log, "run_in_thread", run_here)


def stall(device: Device, queue: str = "compute", after: int = 0) -> None:
    """Stops this queue of a simulated device after its next ``after`` entries."""
    device.scheduler.stall((device.physical, queue), after)


def resume(device: Device, queue: str = "compute") -> None:
    device.scheduler.resume((device.physical, queue))


def watchdogs() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "gradreduce-watchdog"]


def wait_for_failure(mesh: Mesh) -> str:
    """Waits until the mesh has failed and its waiters are woken; returns the reason."""
    assert mesh.mesh_state.failure_reported.wait(TEST_TIMEOUT), "the mesh has not failed"
    assert mesh.mesh_state.reason is not None
    return mesh.mesh_state.reason


@contextmanager
def no_thread_starts() -> Iterator[list[bool]]:
    """In this context, no thread can be started when the list is not empty."""
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
