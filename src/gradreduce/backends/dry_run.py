"""Dry-run devices: record launches, copies and waits without executing them.

A plan is made by running the reduction itself on Buffers without memory, so there is no second
description of it that could become wrong. Nothing is allocated, compiled or waited for. Other
processes take no part: the dry run assumes that they send what this one sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from functools import cache
from itertools import count, cycle
from typing import Any, Self

import numpy as np

from gradreduce.comm.process_group import LocalGroup
from gradreduce.device import (
    ALIGNMENT,
    QUEUES,
    BackendKind,
    Block,
    Buffer,
    Collective,
    CollectiveCall,
    Command,
    Device,
    Event,
    HostCopy,
    HostMove,
    Kernel,
    Mark,
    Mesh,
    MeshState,
    Parcel,
    Queue,
    Ranks,
    Row,
    Template,
    User,
    WaitPolicy,
)
from gradreduce.errors import DeviceMismatchError

_ADDRESS_BITS = 44  # the distance of blocks, which have up to 16 TiB


class DryRunMesh:
    """A mesh of dry-run devices, and Buffers like those of another mesh.

    Args:
        placement: the physical device of each logical device.
        backend: the name of the backend.
        peer_access: the pairs of physical devices that have it.
        processes: the rank of this process, and the number of devices of each process.
        ranks: the ranks of the library's collectives over the processes; None: it has none.
        compiles: see ``Device``; True for ``compile_ahead``.

    Attributes:
        mesh: the mesh of dry-run devices.
    """

    def __init__(
        self,
        placement: Sequence[int],
        kind: BackendKind,
        peer_access: bool | Set[tuple[int, int]],
        processes: tuple[int, tuple[int, ...]],
        ranks: Ranks | None = None,
        *,
        compiles: bool = False,
    ) -> None:
        group = LocalGroup(*processes)
        mesh_state = MeshState(kind, group, peer_access=peer_access)
        if ranks is not None:
            group.collective = DryRunCollective(mesh_state, ranks)
        starts = count(1)
        self._devices = [
            DryRunDevice(mesh_state, index, physical, starts, compiles=compiles)
            for index, physical in enumerate(placement)
        ]
        collective = cache(lambda: DryRunCollective(mesh_state))
        self.mesh = Mesh(self._devices, mesh_state, collective, lambda: None)
        self._blocks: dict[int, Block] = {}

    @classmethod
    def like(cls, mesh: Mesh, *, compiles: bool = False) -> Self:
        """Makes a dry-run copy of the whole of ``mesh``."""
        whole = mesh.devices[0].mesh
        group = whole.mesh_state.processes
        physical = [device.physical for device in whole.devices]
        peers = whole.mesh_state.peer_access
        processes = group.rank, group.counts
        ranks = None if group.collective is None else group.collective.ranks
        kind = whole.mesh_state.kind
        return cls(physical, kind, peers, processes, ranks, compiles=compiles)

    def devices_like(self, originals: Sequence[Device]) -> tuple[DryRunDevice, ...]:
        """Returns the dry-run copies of devices."""
        return tuple([self._devices[device.index] for device in originals])

    def buffer(self, original: Buffer) -> Buffer:
        """Makes a Buffer like ``original``; shares a block if the originals do.

        ``original`` must stay alive.
        """
        block = original.block
        copy = self._blocks.get(id(block))
        if copy is None:
            copy = self._blocks[id(block)] = self._devices[original.device.index].block(
                block.nbytes, start=block.address % ALIGNMENT, peer_mapped=block.peer_mapped
            )
        return Buffer(copy, original.offset, original.shape, original.dtype)


class DryRunDevice(Device):
    """A device that checks and records calls, without memory and queues."""

    def __init__(
        self,
        mesh_state: MeshState,
        index: int,
        physical: int,
        starts: Iterator[int],
        *,
        compiles: bool,
    ) -> None:
        super().__init__(mesh_state, index, physical)
        mesh_state.order.is_needed = False
        self.compiles = compiles
        self._starts = starts

    def block(self, nbytes: int, *, start: int = 0, peer_mapped: bool = True) -> Block:
        """Makes a block that no other block of its mesh overlaps."""
        address = (next(self._starts) << _ADDRESS_BITS) + start
        block = Block(self, None, address, nbytes, owned=True, writable=True)
        block.peer_mapped = peer_mapped
        return block

    def foreign(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        """Makes a Buffer of its own memory, which is not mapped for peers, as a caller's may be."""
        nbytes = math.prod(shape) * dtype.itemsize
        return Buffer(self.block(nbytes, peer_mapped=False), 0, shape, dtype)

    def put_all(
        self, arrays: Sequence[Any], addresses: Sequence[int] | None = None
    ) -> list[Buffer]:
        """Raises: there is no memory."""
        return [self._adopt(array, writable=True) for array in arrays]

    def _adopt(self, array: Any, writable: bool) -> Buffer:
        raise DeviceMismatchError(
            f"{self.name} of a plan has no memory for a {type(array).__name__}"
        )

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
        raise NotImplementedError("nothing waits for the work of a plan")

    def _trim(self) -> None:
        """Does nothing, like the methods below that would write or wait."""

    def _compile_kernel(self, kernel: Kernel, template: Template) -> None: ...

    def _fill_zero(self, buffer: Buffer) -> None: ...

    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        dst.block.raw = array  # the reduction may read numbers and row indices

    def _make_download(self, buffer: Buffer) -> tuple[Command, HostCopy]:
        return lambda: None, lambda: None

    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None: ...

    def _make_launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> tuple[Command, None]:
        return lambda: None, None

    def _exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: HostMove
    ) -> None:
        """Receives what is sent to each process, repeated if more is expected."""
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


class DryRunCollective(Collective):
    """A collective that checks and records calls."""

    def _call(self, call: CollectiveCall) -> None:
        self._submit(lambda: None, [call])
