"""The interface of a collective library.

A collective runs on one queue of each device, with at most one buffer on each physical device.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
    if name == "reduce":  # every rank but the root sends
        return (num_ranks - 1) * nbytes // num_ranks
    return (num_ranks - 1) * nbytes


class CollectiveCall(NamedTuple):
    """One checked call.

    Attributes:
        name: ``all_reduce``, ``reduce``, ``broadcast`` or ``all_gather``.
        inputs: for each rank the buffer that is read, on its device.
        outputs: for each rank the buffer that is written. In a broadcast, and for the ranks of a
            reduce that are not the root, the inputs.
        root: the root rank of a reduce or broadcast.
        queue: the queue of each device that runs the call.
    """

    name: str
    inputs: Sequence[Buffer]
    outputs: Sequence[Buffer]
    root: int | None
    queue: Queue


class Collective(ABC):
    """Collectives over one buffer on each physical device, each on a queue of that device."""

    def __init__(self, mesh_state: MeshState) -> None:
        self._mesh_state = mesh_state

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
        self, output: Buffer, sources: Sequence[Buffer], root: int, *, queue: Queue = "compute"
    ) -> None:
        """Sets ``output`` to the sum of all sources, on the device of ``sources[root]``.

        ``output`` may be that source itself. Raises what ``all_reduce`` raises.
        """
        self._check_rank("reduce", root, sources)
        self._check("reduce", sources, [output])
        self._check_outputs("reduce", [output], [sources[root]], sources[root].size)
        outputs = [*sources[:root], output, *sources[root + 1 :]]
        self._call(CollectiveCall("reduce", sources, outputs, root, queue))

    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """Copies ``buffers[root]`` to every buffer; raises as ``all_reduce`` does."""
        self._check_rank("broadcast", root, buffers)
        self._check("broadcast", buffers, [*buffers[:root], *buffers[root + 1 :]])
        self._call(CollectiveCall("broadcast", buffers, buffers, root, queue))

    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """Concatenates all inputs into every output, in order; raises as ``all_reduce`` does.

        Each output is on its input's device and has the total size of all inputs.
        """
        self._check("all_gather", inputs, outputs)
        self._check_outputs("all_gather", outputs, inputs, sum(each.size for each in inputs))
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

    def _check_rank(self, name: str, root: int, buffers: Sequence[Buffer]) -> None:
        """Raises ``CollectiveError`` unless ``root`` is the rank of a buffer."""
        if not 0 <= root < len(buffers):
            raise CollectiveError(
                f"{name}: root={root} must be from 0 to {len(buffers) - 1}, the last buffer"
            )

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
