"""Fences of work that is given again, without the calls that made them the first time.

``adopt``, ``release`` and ``launch`` fence as they go. Who plays a tape passes by none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .base import Device
from .memory import Buffer

__all__ = ["behind_readers", "follow", "precede", "whole_block"]


def follow(device: Device, stream: int) -> None:
    """The compute queue waits for what a caller's stream holds now, as in ``adopt``."""
    device.fabric.check_usable(device)
    device._follow(stream)


def precede(device: Device, stream: int | None) -> None:
    """A caller's stream (None: the host) waits for the compute queue, as in ``release``."""
    device.fabric.check_usable(device)
    device._precede(stream)


def behind_readers(buffers: Iterable[Buffer]) -> None:
    """Each one's compute queue waits for the copies that still read it, as in ``launch``."""
    for buffer in buffers:
        buffer.device._before_write(buffer, "compute")


def whole_block(part: Buffer) -> Buffer:
    """All bytes of the block that ``part`` lies in."""
    return Buffer(part.block, 0, (part.block.nbytes,), np.dtype(np.uint8))
