"""Checks which memory a device may access, and copies what it may not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from gradreduce.errors import DeviceMismatchError

from .buffer import Block, Buffer, Queue, Row

if TYPE_CHECKING:
    from gradreduce.device.device import Device


def can_access(device: Device, operand: Buffer) -> bool:
    """Whether a launch on ``device`` can access ``operand``, which is of the same mesh.

    True for memory of the same physical device, and for memory of a peer that is mapped for peers.
    """
    here, there = device.physical, operand.device.physical
    return here == there or (device.mesh_state.peers(here, there) and operand.block.peer_mapped)


def check_accessible(device: Device, operand: Buffer) -> None:
    """Raises unless a launch on ``device`` can access ``operand``.

    Raises:
        DeviceMismatchError: the operand is of another mesh, on a device that is not a peer, or in a
            caller's memory on a peer that is not mapped for peers.
    """
    home = operand.device
    if home is device:
        return
    mesh_state = device.mesh_state
    if home.mesh_state is not mesh_state:
        raise DeviceMismatchError(
            f"{operand} is of another mesh than {device.name}: pass its .numpy()"
        )
    if mesh_state.failed:
        mesh_state.check_usable(home)
    if not can_access(device, operand):
        mapped = operand.block.peer_mapped
        why = "no peer access" if mapped else "peers can access only memory of cudaMalloc"
        raise DeviceMismatchError(f"{device.name} cannot access {operand}: {why}; copy it first")


def check_all_accessible(device: Device, blocks: Iterable[Block], rows: Iterable[Row]) -> int:
    """Checks all operands, which are in these blocks; returns the bytes that cross a link."""
    here, mesh_state = device.physical, device.mesh_state
    homes = {block.device for block in blocks}
    away = {home for home in homes if home.physical != here or home.mesh_state is not mesh_state}
    if not away:
        return 0
    are_peers = all([each.mesh_state is mesh_state for each in away]) and all(
        [mesh_state.peers(here, each.physical) for each in away]
    )
    if mesh_state.failed or not (are_peers and all([block.peer_mapped for block in blocks])):
        for operand in chain.from_iterable(rows):
            check_accessible(device, operand)
    return sum([operand.nbytes for row in rows for operand in row if operand.device in away])


def check_writable(operand: Buffer) -> None:
    """Raises ``ValueError`` for a caller's read-only array."""
    if not operand.block.writable:
        raise ValueError(f"{operand} is read-only: pass a copy")


def by_physical(devices: Sequence[Device]) -> dict[int, tuple[int, ...]]:
    """Maps each physical device to the indices of its logical devices, in order."""
    indices: dict[int, list[int]] = {}
    for index, device in enumerate(devices):
        indices.setdefault(device.physical, []).append(index)
    return {physical: tuple(found) for physical, found in indices.items()}


def ensure_accessible(device: Device, buffer: Buffer, queue: Queue = "compute") -> Buffer:
    """Returns ``buffer`` itself if launches of ``device`` can access it, else a copy."""
    if can_access(device, buffer):
        check_accessible(device, buffer)  # its device may have failed
        return buffer
    return copy_to(device, buffer, queue)


def to_local(device: Device, buffer: Buffer) -> Buffer:
    """Like ``ensure_accessible``, but also copies a peer's memory."""
    return buffer if buffer.device.physical == device.physical else copy_to(device, buffer)


def copy_to(device: Device, buffer: Buffer, queue: Queue = "compute") -> Buffer:
    """Returns a copy on ``device``."""
    copied = device.empty(buffer.shape, buffer.dtype)
    device.copy(copied, buffer, queue=queue)
    return copied
