"""Captures of commands that no reduction has recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradreduce.device import Capture, CommandList, Device


def captured(
    devices: Sequence[Device],
    work: Callable[[], object],
    meanwhile: Callable[[], object] | None = None,
) -> Capture:
    """Records what ``work`` submits, which runs; captures it, and ``meanwhile`` during that."""
    commands = CommandList()
    with devices[0].mesh_state.recording_commands(commands):
        work()
    commands.close()
    if meanwhile is not None:
        calls = [meanwhile]  # not again in each call of the simulation
        commands.add(lambda: calls.pop()() if calls else None)
    return Capture(devices, commands)
