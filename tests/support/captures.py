"""Captures of commands that a test records, without a reduction."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradreduce.device import Capture, CommandList, Device, RepeatedWork
from gradreduce.device.run.commands import Operation


class RepeatedCapture(NamedTuple):
    """A capture, submitted as a captured step submits it."""

    work: RepeatedWork
    capture: Capture

    def submit(self) -> None:
        self.work.run(self.capture.submit)


def captured(
    devices: Sequence[Device],
    work: Callable[[], object],
    meanwhile: Callable[[], object] | None = None,
) -> RepeatedCapture:
    """Calls ``work`` and records what it submits; then captures it.

    During the capture, it calls ``meanwhile`` after the first operation.
    """
    commands = CommandList()
    with devices[0].mesh_state.recording_commands(commands):
        work()
        repeated = RepeatedWork(devices, commands)
    if meanwhile is not None:
        calls = [meanwhile]  # called once, not in each call of the simulation
        once = Operation(lambda: calls.pop()() if calls else None)
        commands.operations.insert(1, once)
    return RepeatedCapture(repeated, Capture(devices, commands))
