"""Captures of commands that a test records, without a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import Capture, CommandList, Device
from gradreduce.device.command_list import Operation


def captured(
    devices: Sequence[Device],
    work: Callable[[], object],
    meanwhile: Callable[[], object] | None = None,
) -> Capture:
    """Calls ``work`` and records what it submits; then captures it.

    During the capture, it calls ``meanwhile`` after the first operation.
    """
    commands = CommandList()
    with devices[0].mesh_state.recording_commands(commands):
        work()
    commands.close()
    if meanwhile is not None:
        calls = [meanwhile]  # called once, not in each call of the simulation
        once = Operation(lambda: calls.pop()() if calls else None)
        commands.operations.insert(1, once)
    return Capture(devices, commands)
