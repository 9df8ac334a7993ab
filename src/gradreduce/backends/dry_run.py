"""Dry-run devices: record launches, copies and waits without executing them.

The flow itself runs, on Buffers without memory, so its plan is what it does, by construction: no
second description of it could grow out of date. Nothing is allocated, compiled or waited for.
Other processes are not asked either: they count as sending what this one sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, cycle
from typing import Any

import numpy as np

from gradreduce.device import (
    ALIGNMENT,
    Block,
    Buffer,
    Collective,
    Device,
    Kernel,
    Mark,
    Mesh,
    Queue,
    Template,
)
from gradreduce.device.backend import Event
from gradreduce.device.buffer import Row, User
from gradreduce.device.collective import CollectiveCall
from gradreduce.device.command_list import Command
from gradreduce.device.graph_capture import Recording
from gradreduce.device.mesh_state import MeshState
from gradreduce.device.op_log import QUEUES
from gradreduce.device.pending_calls import WaitPolicy
from gradreduce.device.process_group import Description, Message, Move, Parcel, ProcessGroup
from gradreduce.errors import DeviceMismatchError

_ADDRESS_BITS = 44  # bits: blocks of up to 16 TiB lie this far apart

# Logical devices' physical ones, backend, peer access, and in one of several processes its rank and
# the number of devices of each: all that a flow asks of a mesh.
MeshSignature = tuple[
    tuple[int, ...], str, bool | frozenset[tuple[int, int]], tuple[int, tuple[int, ...]] | None
]
# Of a Buffer: device, block, whether peers can access that, its bytes, the offset in it, how far
# its address is behind a 16-byte boundary, shape, dtype.
Signature = tuple[int, int, bool, int, int, int, tuple[int, ...], np.dtype]


def mesh_signature(mesh: Mesh) -> MeshSignature:
    """Returns what a plan depends on in a mesh."""
    whole = mesh.devices[0].mesh
    access = whole.mesh_state.peer_access
    peers = access if isinstance(access, bool) else frozenset(access)
    group = whole.mesh_state.process_group
    processes = None if group is None else (group.rank, group.counts)
    return tuple(device.physical for device in whole.devices), whole.backend, peers, processes


def signature_of(buffer: Buffer, blocks: dict[int, int]) -> Signature:
    """Returns what a plan depends on in a Buffer.

    Args:
        buffer: any.
        blocks: the numbers that blocks were given so far; a new block gets the next.
    """
    block = buffer.block
    number = blocks.setdefault(id(block), len(blocks))
    start = block.address % ALIGNMENT
    return (
        buffer.device.index, number, block.peer_mapped, block.nbytes, buffer.offset, start,
        buffer.shape, buffer.dtype,
    )  # fmt: skip


class DryRunMesh:
    """A mesh of dry-run devices like another mesh, and Buffers like its Buffers.

    Attributes:
        mesh: as many devices, on the same physical ones, with the same peer access.
    """

    def __init__(self, signature: MeshSignature) -> None:
        placement, backend, peers, processes = signature
        mesh_state = MeshState(backend, peer_access=peers)
        if processes is not None:
            mesh_state.process_group = DryRunGroup(*processes)
        starts = count(1)
        made = [
            DryRunDevice(mesh_state, index, physical, starts)
            for index, physical in enumerate(placement)
        ]
        collective = cache(lambda: DryRunCollective(mesh_state))
        self.mesh = Mesh(made, mesh_state, collective, lambda: None)
        self._blocks: dict[int, Block] = {}

    def buffer(self, signature: Signature) -> Buffer:
        """Makes a Buffer with this signature; shares a block where the originals did."""
        index, number, peer_mapped, nbytes, offset, start, shape, dtype = signature
        if number not in self._blocks:
            device = self.mesh.devices[index]
            assert isinstance(device, DryRunDevice)
            self._blocks[number] = device.block(nbytes, start=start, peer_mapped=peer_mapped)
        return Buffer(self._blocks[number], offset, shape, dtype)


class _DryRunEvent:
    """Every event: no work is queued."""

    done = True


class DryRunDevice(Device):
    """A device that checks and records calls, and has neither memory nor queues."""

    def __init__(
        self, mesh_state: MeshState, index: int, physical: int, starts: Iterator[int]
    ) -> None:
        super().__init__(mesh_state, index, physical)
        self._starts = starts

    def block(self, nbytes: int, *, start: int = 0, peer_mapped: bool = True) -> Block:
        """Makes a block that no other block of its mesh overlaps."""
        address = (next(self._starts) << _ADDRESS_BITS) + start
        block = Block(self, None, address, nbytes, owned=True, writable=True)
        block.peer_mapped = peer_mapped
        return block

    def put(self, array: Any, address: int | None = None) -> Buffer:
        """Raises: there is no memory."""
        raise DeviceMismatchError(
            f"{self.name} of a plan has no memory for a {type(array).__name__}"
        )

    def _adopt(self, array: Any, writable: bool) -> Buffer:
        return self.put(array)

    def _array_of(self, buffer: Buffer) -> Any:
        raise DeviceMismatchError(f"{buffer} of a plan has no memory")

    def _download(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        if buffer.block.raw is None:
            raise DeviceMismatchError(f"{buffer} of a plan has no memory")
        array: np.ndarray = buffer.block.raw
        return array

    def _allocate(self, nbytes: int) -> Block:
        return self.block(nbytes)

    def _mark(self, queue: User) -> Event:
        return _DryRunEvent()

    def _prepare(self, kernel: Kernel, template: Template, may_compile: bool = True) -> bool:
        return True

    def _recording(self, devices: Sequence[Device]) -> Recording:
        raise DeviceMismatchError(f"{self.name} of a plan cannot record a capture")

    def _trim(self) -> None:
        """Does nothing, as do the methods below that would write or wait."""

    def _fill_zero(self, buffer: Buffer) -> None: ...

    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        dst.block.raw = array  # the flow may read numbers and indices of rows

    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None: ...

    def _resolved(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> Command:
        return lambda: None

    def _exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: Move
    ) -> None:
        """Receives from each process what is sent to it: again from the start, if it sends more."""
        sent = {to: cycle([each for rank, each in sends if rank == to]) for to, _ in sends}
        for rank, buffer in receives:
            array = next(sent[rank]).block.raw if rank in sent else None
            if array is not None:
                buffer.block.raw = np.resize(array, buffer.shape)

    def _wait(self, mark: Mark, queue: User) -> None: ...

    def _synchronize(self, wait_policy: WaitPolicy, queues: Sequence[Queue] = QUEUES) -> bool:
        return True

    def _abandon(self, seconds: float) -> bool:
        return True


class DryRunGroup(ProcessGroup):
    """A group whose other processes are not asked."""

    def __init__(self, rank: int, counts: tuple[int, ...]) -> None:
        super().__init__(rank, len(counts), 1.0)
        self.counts = counts

    def agree(self, description: Description, seconds: float) -> None:
        """See ``ProcessGroup.agree``."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, seconds: float
    ) -> None:
        """See ``ProcessGroup.exchange``."""

    def post(self, key: str, text: str) -> None:
        """See ``ProcessGroup.post``."""

    def read(self, rank: int, key: str, seconds: float) -> str | None:
        """See ``ProcessGroup.read``."""
        return None


class DryRunCollective(Collective):
    """A collective that checks and records calls."""

    def _call(self, call: CollectiveCall) -> None:
        self._submit(lambda: None, [call])
