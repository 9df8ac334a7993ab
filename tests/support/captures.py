"""Captures of commands that no reduction has recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import Capture, CommandList, Device
from gradreduce.device.command_list import Operation


def captured(
    devices: Sequence[Device],
    work: Callable[[], object],
    meanwhile: Callable[[], object] | None = None,
) -> Capture:
    """Records what ``work`` submits, which runs; captures it.

    During that, after the first operation, it calls ``meanwhile``.
    """
    commands = CommandList()
    with devices[0].mesh_state.recording_commands(commands):
        work()
    commands.close()
    if meanwhile is not None:
        calls = [meanwhile]  # not again in each call of the simulation
        once = Operation(lambda: calls.pop()() if calls else None)
        commands.operations.insert(1, once)
    return Capture(devices, commands)
