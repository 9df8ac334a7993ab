"""The interface of a collective library.

All of it runs on one queue of each of the buffers' devices, at most one buffer on each physical
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gradreduce.errors import CollectiveError, DeviceMismatchError, listed

from .buffer import Buffer, Queue
from .command_list import Command
from .op_log import Record

if TYPE_CHECKING:
    from .device import Device

# docs.nvidia.com/deeplearning/nccl/user-guide: "Using NCCL with CUDA Graphs", as of NCCL 2.30
NOT_CAPTURED = (
    "a collective over several devices of one process cannot be captured: NVIDIA warns that a "
    "launch of such a graph may block before every device has its launch, which is a deadlock; "
    "capture 'hierarchical_copy', or use prepare instead of capture"
)


class Collective(ABC):
    """Collectives over one buffer on each physical device, each on a queue of that device.

    As a launch does, a collective fences nothing by itself: what it reads and writes must be
    ready for its queue.
    """

    @abstractmethod
    def all_reduce(
        self,
        buffers: Sequence[Buffer],
        op: str = "sum",
        *,
        sources: Sequence[Buffer] | None = None,
        queue: Queue = "compute",
    ) -> None:
        """Sets every buffer to the sum of all sources (default: the buffers, in place).

        Args:
            buffers: one on each physical device; overwritten.
            op: what is done to them.
            sources: of each buffer one that lies where it does, alike; itself or apart from all
                buffers. Only read.
            queue: of each device.

        Raises:
            CollectiveError: no buffer, two on one physical device, one that is read-only, or
                sizes or dtypes differ.
            DeviceMismatchError: the buffers are of several meshes.
        """

    @abstractmethod
    def broadcast(self, buffers: Sequence[Buffer], root: int, *, queue: Queue = "compute") -> None:
        """Copies ``buffers[root]`` to every buffer; raises as ``all_reduce`` does."""

    @abstractmethod
    def all_gather(
        self, outputs: Sequence[Buffer], inputs: Sequence[Buffer], *, queue: Queue = "compute"
    ) -> None:
        """Concatenates all inputs into every output, in order; raises as ``all_reduce`` does.

        Each output lies where its input does and has the size of all inputs together.
        """

    def connect(self, devices: Sequence[Device]) -> None:  # noqa: B027  # not every one must
        """Connects these devices, one on each physical device, in this order.

        A call does it too; but whoever launches something first wants to fail before that.
        """

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context manager: calls inside are submitted as one operation."""
        yield

    def _check(self, name: str, buffers: Sequence[Buffer], written: Sequence[Buffer]) -> None:
        """Raises unless the buffers agree and are on different devices of one mesh."""
        if len({buffer.device.physical for buffer in buffers}) != max(1, len(buffers)):
            raise CollectiveError(
                f"{name}: pass exactly one buffer for each physical device; got [{listed(buffers)}]"
            )
        first = buffers[0]
        for position, buffer in enumerate(buffers):
            if buffer.device.mesh_state is not first.device.mesh_state:
                raise DeviceMismatchError(f"{name}: buffer {position} is of another mesh")
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

    def _check_broadcast(self, buffers: Sequence[Buffer], root: int) -> None:
        """Raises unless ``buffers[root]`` can be copied to the others."""
        if not 0 <= root < len(buffers):
            raise CollectiveError(
                f"broadcast: root={root} must be from 0 to {len(buffers) - 1}, the last buffer"
            )
        self._check("broadcast", buffers, [*buffers[:root], *buffers[root + 1 :]])

    def _check_sources(
        self, name: str, buffers: Sequence[Buffer], sources: Sequence[Buffer] | None
    ) -> Sequence[Buffer]:
        """Returns the sources (default: the buffers); raises unless they match the buffers."""
        self._check(name, buffers, buffers)
        if sources is None:
            return buffers
        self._check(name, sources, ())
        alike = (buffers[0].size, buffers[0].dtype) == (sources[0].size, sources[0].dtype)
        if not alike or [each.device for each in sources] != [each.device for each in buffers]:
            raise CollectiveError(
                f"{name}: sources [{listed(sources)}] must have the devices, sizes and dtype of "
                f"the buffers [{listed(buffers)}]"
            )
        return sources

    def _check_gather(self, outputs: Sequence[Buffer], inputs: Sequence[Buffer]) -> None:
        """Raises unless each output is on its input's device and can hold all inputs."""
        self._check("all_gather", inputs, outputs)
        size = sum(buffer.size for buffer in inputs)
        if [out.device for out in outputs] != [buffer.device for buffer in inputs]:
            raise CollectiveError(
                "all_gather: each output must be on the device of its input; got outputs "
                f"[{listed(outputs)}] for inputs [{listed(inputs)}]"
            )
        for position, out in enumerate(outputs):
            if (out.size, out.dtype) != (size, inputs[0].dtype):
                raise CollectiveError(
                    f"all_gather: output {position} is {out}; expected size {size} and dtype "
                    f"{inputs[0].dtype}"
                )

    def _submit(
        self,
        command: Command,
        calls: Sequence[tuple[str, Sequence[Buffer], Queue]],
        kept: Sequence[Buffer],
    ) -> None:
        """Submits a group of calls; adds one record for each buffer of each call.

        Args:
            command: gives them, each time it is called.
            calls: name, buffers and queue of each; at least one buffer in all.
            kept: whatever memory they use beside these.
        """
        buffers = [buffer for _, each, _ in calls for buffer in each]
        queues = dict.fromkeys(queue for _, _, queue in calls if queue != "compute")
        for buffer in (*buffers, *kept) if queues else ():
            buffer.block.touched.update((buffer.device, queue) for queue in queues)
        mesh_state = buffers[0].device.mesh_state
        if (
            mesh_state.capture is not None
            and len({buffer.device.physical for buffer in buffers}) > 1
        ):
            raise CollectiveError(NOT_CAPTURED)
        mesh_state.submitted()  # before: one that fails may have been given to some of the devices
        with mesh_state.recording_commands(None):  # its fences are its own
            command()
        label = mesh_state.flight_recorder.thread.label
        records = tuple(
            Record("collective", name, buffer.device.index, -1, buffer.nbytes, queue, label=label)
            for name, each, queue in calls
            for buffer in each
        )
        mesh_state.sink.replayed(records)
        if mesh_state.command_list is not None:
            mesh_state.command_list.add(command, records, [*buffers, *kept])
