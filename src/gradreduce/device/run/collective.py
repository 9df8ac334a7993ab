"""The interface of a collective library.

A collective runs on one queue of each device, with at most one buffer on each physical device. Over
several processes each process passes the buffers of its own ranks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from gradreduce.device.log.op_log import Record
from gradreduce.device.memory.buffer import Buffer, Queue
from gradreduce.device.order.order import Work
from gradreduce.errors import CollectiveError, DeviceMismatchError, listed

from .commands import Command

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.mesh_state import MeshState

# docs.nvidia.com/deeplearning/nccl/user-guide: "Using NCCL with CUDA Graphs", as of NCCL 2.30
NOT_CAPTURED = (
    "a collective over several devices of one process cannot be captured: NVIDIA warns that a "
    "launch of such a graph may block before every device has its launch, which is a deadlock; "
    "capture 'hierarchical_copy', or use prepare instead of capture"
)


def bytes_sent(name: str, nbytes: int, num_ranks: int) -> int:
    """Returns the bytes that each rank of a ring sends in a collective."""
    if name == "all_reduce":
        return 2 * (num_ranks - 1) * nbytes // num_ranks
    if name in ("reduce", "reduce_scatter"):  # in a reduce every rank but the root sends
        return (num_ranks - 1) * nbytes // num_ranks
    return (num_ranks - 1) * nbytes


class CollectiveCall(NamedTuple):
    """One checked call.

    Attributes:
        name: ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` or ``reduce_scatter``.
        inputs: for each rank of this process the buffer that is read, on its device.
        outputs: for each of these ranks the buffer that is written. In a broadcast, and for the
            ranks of a reduce that are not the root, the inputs.
        root: the root rank of a reduce or broadcast.
        queue: the queue of each device that runs the call.
    """

    name: str
    inputs: Sequence[Buffer]
    outputs: Sequence[Buffer]
    root: int | None
    queue: Queue


class Ranks(NamedTuple):
    """The ranks of a collective over several processes; those of a process follow each other.

    Attributes:
        of_replicas: the rank of each replica of all processes. Replicas that share a rank are
            added before the collective.
        first_replica: the number of this process's first replica.
    """

    of_replicas: tuple[int, ...]
    first_replica: int

    @classmethod
    def of_gpus(cls, gpus: Sequence[Sequence[Hashable]], process: int) -> Ranks:
        """Gives each GPU of each process a rank.

        Args:
            gpus: for each process the GPU of each of its replicas.
            process: the number of this process.
        """
        all_gpus = [(rank, gpu) for rank, each in enumerate(gpus) for gpu in each]
        numbers = {gpu: number for number, gpu in enumerate(dict.fromkeys(all_gpus))}
        return cls(tuple([numbers[gpu] for gpu in all_gpus]), sum(map(len, gpus[:process])))

    @property
    def size(self) -> int:
        """The number of ranks of all processes."""
        return max(self.of_replicas) + 1

    @property
    def first(self) -> int:
        """The first rank of this process."""
        return self.of_replicas[self.first_replica]

    def of(self, device: Device) -> int:
        """Returns the rank of a device of this process."""
        return self.of_replicas[self.first_replica + device.index]

    def homes(self, devices: Sequence[Device]) -> dict[int, Device]:
        """Returns each rank's first device among these; ranks in order."""
        homes: dict[int, Device] = {}
        for device in devices:
            homes.setdefault(self.of(device), device)
        return {rank: homes[rank] for rank in sorted(homes)}


class Collective(ABC):
    """Collectives over one buffer on each physical device, each on a queue of that device.

    Args:
        mesh_state: the state of the mesh.
        ranks: the ranks, if the collectives are over several processes. Default: the buffers of a
            call are its ranks.
    """

    def __init__(self, mesh_state: MeshState, ranks: Ranks | None = None) -> None:
        self._mesh_state = mesh_state
        self.ranks = ranks

    @abstractmethod
    def _call(self, call: CollectiveCall) -> None:
        """Submits a call, or keeps it until the group ends."""

    def all_reduce(
        self,
        buffers: Sequence[Buffer],
        *,
        sources: Sequence[Buffer] | None = None,
        queue: Queue = "compute",
    ) -> None:
        """Sets every buffer to the sum of all sources (default: the buffers, in place).

        Args:
            buffers: one buffer on each physical device; overwritten.
            sources: for each buffer a source on the same device, of its size and dtype: the buffer
                itself, or memory that overlaps no buffer.
            queue: the queue of each device that runs the call.

        Raises:
            CollectiveError: there is no buffer, two are on one physical device, one is read-only,
                or sizes or dtypes differ.
            DeviceMismatchError: a buffer belongs to another mesh.
        """
        sources = buffers if sources is None else sources
        self._check("all_reduce", buffers, buffers)
        self._check("all_reduce", sources, ())
        self._check_outputs("all_reduce", buffers, sources, sources[0].size)
        self._call(CollectiveCall("all_reduce", sources, buffers, None, queue))

    def reduce(
        self,
        output: Buffer | None,
        sources: Sequence[Buffer],
        root: int,
        *,
        queue: Queue = "compute",
    ) -> None:
        """Sets ``output`` to the sum of all sources, on the device of the root's source.

        ``output`` may be that source itself; it is None if another process has the root. Raises
        what ``all_reduce`` raises.
        """
        place = self._place("reduce", root, sources)
        self._check("reduce", sources, [] if output is None else [output])
        outputs = [*sources]
        if output is not None:
            self._check_outputs("reduce", [output], [sources[place]], sources[place].size)
            outputs[place] = output
        self._call(CollectiveCall("reduce", sources, outputs, root, queue))

    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """Copies the buffer of the root to every buffer; raises as ``all_reduce`` does."""
        place = self._place("broadcast", root, buffers)
        written = [buffer for here, buffer in enumerate(buffers) if here != place]
        self._check("broadcast", buffers, written)
        self._call(CollectiveCall("broadcast", buffers, buffers, root, queue))

    def reduce_scatter(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """Cuts the sum of all inputs into equal parts, one for the output of each rank, in order.

        Each output is on its input's device. Raises what ``all_reduce`` raises.
        """
        self._check("reduce_scatter", outputs, outputs)
        self._check("reduce_scatter", inputs, ())
        whole = self._num_ranks(inputs) * outputs[0].size
        self._check_outputs("reduce_scatter", inputs, outputs, whole)
        self._call(CollectiveCall("reduce_scatter", inputs, outputs, None, queue))

    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """Concatenates all inputs into every output, in order; raises as ``all_reduce`` does.

        Each output is on its input's device and has the total size of the inputs of all ranks.
        """
        self._check("all_gather", inputs, outputs)
        whole = self._num_ranks(inputs) * inputs[0].size
        self._check_outputs("all_gather", outputs, inputs, whole)
        self._call(CollectiveCall("all_gather", inputs, outputs, None, queue))

    def connect(self, devices: Sequence[Device]) -> None:  # noqa: B027  # optional
        """Connects these devices, one on each physical device, in this order.

        A collective does that too. Call this first if a failure must come before other work is
        launched.
        """

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context manager: calls inside are submitted as one operation."""
        yield

    def _num_ranks(self, buffers: Sequence[Buffer]) -> int:
        return len(buffers) if self.ranks is None else self.ranks.size

    def _place(self, name: str, root: int, buffers: Sequence[Buffer]) -> int:
        """Returns the place among ``buffers`` of the root's, which another process may have.

        Raises:
            CollectiveError: ``root`` is no rank.
        """
        last = self._num_ranks(buffers) - 1
        if not 0 <= root <= last:
            what = "buffer" if self.ranks is None else "rank"
            raise CollectiveError(f"{name}: root={root} must be from 0 to {last}, the last {what}")
        return root - (0 if self.ranks is None else self.ranks.first)

    def _check_outputs(
        self, name: str, outputs: Sequence[Buffer], inputs: Sequence[Buffer], size: int
    ) -> None:
        """Raises unless each output has its input's device and dtype, and the size ``size``."""
        wanted = [(each.device, size, each.dtype) for each in inputs]
        if [(each.device, each.size, each.dtype) for each in outputs] != wanted:
            raise CollectiveError(
                f"{name}: the outputs [{listed(outputs)}] must have size {size}, and the devices "
                f"and dtype of the inputs [{listed(inputs)}]"
            )

    def _check(self, name: str, buffers: Sequence[Buffer], written: Sequence[Buffer]) -> None:
        """Raises unless the buffers agree and are on different devices of one mesh."""
        if len({buffer.device.physical for buffer in buffers}) != max(1, len(buffers)):
            raise CollectiveError(
                f"{name}: pass exactly one buffer for each physical device; got [{listed(buffers)}]"
            )
        first = buffers[0]
        for position, buffer in enumerate(buffers):
            if buffer.device.mesh_state is not self._mesh_state:
                raise DeviceMismatchError(
                    f"{name}: buffer {position} is of another mesh; pass Buffers of one mesh"
                )
            buffer.device.mesh_state.check_usable(buffer.device)
            if (buffer.size, buffer.dtype) != (first.size, first.dtype):
                raise CollectiveError(
                    f"{name}: buffer {position} is {buffer}, but buffer 0 is {first}: sizes and "
                    "dtypes must be equal"
                )
        for buffer in written:
            if not buffer.block.writable:
                raise CollectiveError(
                    f"{name} would write {buffer}, which is read-only: pass a copy"
                )

    def _submit(self, command: Command, calls: Sequence[CollectiveCall]) -> None:
        """Submits a group of calls; logs one record for each rank of each call.

        Args:
            command: submits the calls, each time it is called.
            calls: at least one.
        """
        mesh_state = self._mesh_state
        works = [
            Work(out.device.queues[call.queue], [(out, read)], 1)
            for call in calls
            for out, read in zip(call.outputs, call.inputs, strict=True)
        ]
        thread = mesh_state.thread
        thread.num_submitted += 1  # before: a call that fails may have reached some devices
        started = time.perf_counter_ns() if mesh_state.log.num_traces else 0
        mesh_state.order.run(command, works)
        records = [
            Record("collective", call.name, buffer.device.index, -1, buffer.nbytes, call.queue)
            for call in calls
            for buffer in call.inputs
        ]
        for record in records:
            if started:
                thread.started = started
            mesh_state.log.append(record)
        if thread.command_list is not None:
            rows = [row for call in calls for row in zip(call.outputs, call.inputs, strict=True)]
            thread.command_list.add(command, records, rows, 1)


class _Open(threading.local):
    """The calls of a thread's open group; None if no group is open."""

    calls: list[CollectiveCall] | None = None


class GroupedCollective(Collective):
    """A collective that keeps the calls of a group until it ends, and sends them together."""

    def __init__(self, mesh_state: MeshState, ranks: Ranks | None = None) -> None:
        super().__init__(mesh_state, ranks)
        self._open = _Open()

    @abstractmethod
    def _send(self, calls: Sequence[CollectiveCall]) -> None:
        """Submits at least one call as one operation."""

    def _call(self, call: CollectiveCall) -> None:
        """See ``Collective._call``."""
        if self._open.calls is None:
            self._send([call])
        else:
            self._open.calls.append(call)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context manager: sends calls inside together; may be nested."""
        if self._open.calls is not None:
            yield
            return
        calls: list[CollectiveCall] = []
        self._open.calls = calls
        try:
            yield
        finally:
            self._open.calls = None
        if calls:
            self._send(calls)
