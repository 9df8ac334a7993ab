"""The replicas of a call over all processes: compares the call, and sends their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from gradreduce.device import Buffer, Device, Queue, names_of
from gradreduce.errors import CollectiveError, InvalidArgumentError

from .description import Description
from .exchange import describe_stop, exchange, seconds_of
from .process_group import group_of


class Replicas:
    """The replicas of a call: those of this process, and their place among those of all processes.

    One process is a group of one: nothing is compared, sent or received.

    Args:
        devices: the device of each replica of this process. The first one sends and receives.

    Attributes:
        devices: see above.
        group: the processes.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.group = group_of(devices[0])
        self._home = devices[0]
        self._mesh_state = devices[0].mesh_state

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Self:
        """Returns the replicas of one tensor."""
        return cls([buffer.device for buffer in buffers])

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of replicas of each process.

        Raises:
            ValueError: ``devices`` are not all devices of this process, and there are other
                processes. Then the numbers of these are unknown.
        """
        group, devices = self.group, self.devices
        if group.size == 1:
            return (len(devices),)  # they may be a part of its devices
        if len(devices) != group.counts[group.rank]:
            raise ValueError(
                f"a value on {names_of(devices)} cannot be summed "
                f"across processes: pass one replica for each of the {group.counts[group.rank]} "
                "devices of this process's mesh"
            )
        return group.counts

    @property
    def count(self) -> int:
        """The number of replicas of all processes; raises like ``counts``."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """The number of this process's first replica, counted over all processes."""
        return sum(self.group.counts[: self.group.rank])

    # -- calls ------------------------------------------------------------------------------------

    def compare(self, description: Description) -> None:
        """Compares a call with the other processes before its first operation.

        Raises:
            InvalidArgumentError, CollectiveError: another process makes another call, or none. The
                mesh has failed.
        """
        group, mesh_state = self.group, self._mesh_state
        if mesh_state.thread.compared:
            description = description.with_settings(mesh_state.thread.compared)

        def command() -> None:
            try:
                group.agree(description, seconds_of(mesh_state, group))
            except (InvalidArgumentError, CollectiveError) as error:
                mesh_state.fail_all(str(error))
                raise
            except BaseException as error:  # the others have read that this process makes this call
                mesh_state.fail_all(describe_stop(group.called, error))
                raise

        self.run_again_too(command)

    @contextmanager
    def call(self, description: Description) -> Iterator[None]:
        """Context manager: calls ``compare``, then does what ``abort_others_on_error`` does.

        Raises:
            InvalidArgumentError, CollectiveError: see ``compare``.
        """
        self.compare(description)
        with abort_others_on_error(self._home):
            yield
            # A call with empty tensors has no exchange that would post the kept notice.
            self.run_again_too(self.group.post_kept)

    def run_again_too(self, command: Callable[[], None]) -> None:
        """Runs a command now, and in each call of a step that is being prepared."""
        command()
        command_list = self._mesh_state.thread.command_list
        if command_list is not None:
            command_list.add(command)

    # -- values -----------------------------------------------------------------------------------

    def send_to_all(self, owned: Sequence[tuple[int, Buffer]], queue: Queue = "compute") -> None:
        """Queues an exchange in which buffers go from their owners to all other processes.

        Args:
            owned: the rank of each buffer's owner, and the buffer, on the first device. Those of
                other processes are overwritten.
            queue: the queue of that device.
        """
        group = self.group
        own = [buffer for rank, buffer in owned if rank == group.rank]
        sends = [(rank, buffer) for rank in group.others for buffer in own]
        receives = [parcel for parcel in owned if parcel[0] != group.rank]
        exchange(self._home, sends, receives, queue)

    def broadcast(self, owner: int, buffer: Buffer) -> None:
        """Queues a copy of a buffer of one process to all others, on the compute queue.

        Args:
            owner: the rank of that process.
            buffer: its buffer, or one of the same shape and dtype, which is overwritten.
        """
        group, collective = self.group, self.group.collective
        if collective is None or collective.ranks is None or not buffer.nbytes:
            self.send_to_all([(owner, buffer)])
            return
        homes = [*collective.ranks.homes(self._home.mesh.devices).values()]
        # The owner's first rank sends; its others receive, and must not write the buffer.
        writable = homes if group.rank != owner else homes[:1]
        of_ranks = [
            buffer
            if home in writable and home.physical == buffer.device.physical
            else home.empty(buffer.shape, buffer.dtype)
            for home in homes
        ]
        if group.rank == owner and of_ranks[0] is not buffer:
            homes[0].copy(of_ranks[0], buffer)
        collective.broadcast(of_ranks, collective.ranks.of_replicas[sum(group.counts[:owner])])
        if group.rank != owner and not any([each is buffer for each in of_ranks]):
            buffer.device.copy(buffer, of_ranks[0])

    def exchange_all(
        self, own: Sequence[Buffer], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[Buffer]:
        """Sends buffers to all other processes; returns the buffers of all processes, in order.

        Args:
            own: the buffers of this process, on the first device: at least one, all of one dtype.
            shapes: the shapes of the buffers of each process.
        """
        home, dtype = self._home, own[0].dtype
        of_all = [
            list(own) if rank == self.group.rank else [home.empty(each, dtype) for each in of_rank]
            for rank, of_rank in enumerate(shapes)
        ]
        owned = [(rank, buffer) for rank, of_rank in enumerate(of_all) for buffer in of_rank]
        self.send_to_all(owned)
        return [buffer for _, buffer in owned]

    def exchange_arrays(
        self, own: Sequence[np.ndarray], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[np.ndarray]:
        """Like ``exchange_all``, for arrays in host memory. The host waits."""
        if self.group.size == 1:
            return list(own)
        home = self._home
        of_all = self.exchange_all([home.upload(each) for each in own], shapes)
        return [home.download(buffer) for buffer in of_all]

    def exchange_numbers(
        self, numbers: Sequence[int], counts: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Sends integers to all other processes; returns those of all processes. The host waits.

        Args:
            numbers: the numbers of this process.
            counts: how many numbers each process sends. Default: as many as this one.
        """
        shapes = [[(count,)] for count in counts or [len(numbers)] * self.group.size]
        own = np.array(numbers, np.int64)
        return [each.tolist() for each in self.exchange_arrays([own], shapes)]

    def compare_numbers(
        self, call: str, numbers: Sequence[int], counts: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Like ``exchange_numbers``, as a call whose name the processes compare, too."""
        with self.call(Description.of({"call": call, "tensors": []})):
            return self.exchange_numbers(numbers, counts)

    def send_bytes(self, call: str, rank: int, content: bytes) -> bytes:
        """Sends bytes of one process to all others; the host waits.

        Args:
            call: the name of the call, which the processes compare.
            rank: the process that sends.
            content: its bytes; not read in other processes.

        Returns:
            The bytes of that process.
        """
        (size,) = self.compare_numbers(call, [len(content)])[rank]
        with self.call(Description.of({"call": call, "process": rank, "tensors": []})):
            home = self._home
            if rank == self.group.rank:
                buffer = home.upload(np.frombuffer(content, np.uint8))
            else:
                buffer = home.empty((size,), np.dtype(np.uint8))
            self.send_to_all([(rank, buffer)])
            return home.download(buffer).tobytes()


@contextmanager
def comparing(device: Device, settings: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: this thread's calls over processes inside compare these settings, too.

    They join the notices of these calls. So they are compared when they are first used and when
    they have changed; other calls wait for nothing.

    Args:
        device: a device of the mesh.
        settings: numbers, strings and booleans by name.
    """
    thread = device.mesh_state.thread
    before, thread.compared = thread.compared, tuple(settings.items())
    try:
        yield
    finally:
        thread.compared = before


@contextmanager
def abort_others_on_error(device: Device) -> Iterator[None]:
    """Context manager: an error inside fails the mesh and notifies the other processes.

    For work that all processes must do between two exchanges.
    """
    try:
        yield
    except BaseException as error:
        mesh_state = device.mesh_state
        if mesh_state.reason is None:
            mesh_state.fail_all(describe_stop(group_of(device).called, error))
        raise
