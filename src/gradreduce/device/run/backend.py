"""The backend interface: the operations that a backend implements.

``Device`` checks arguments, queues waits, calls these methods and records the operation.
``README.md`` beside this file lists what every backend promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradreduce.device.log.op_log import QUEUES
from gradreduce.device.memory.buffer import Block, Buffer, Mark, Queue, Row, Stream, User, handle_of
from gradreduce.device.processes import GpuMove, HostMove, Parcel, StreamCall
from gradreduce.errors import DeviceMismatchError

from .commands import Command, CommandList
from .kernel import Kernel, Template

if TYPE_CHECKING:
    from gradreduce.device.device import Device
    from gradreduce.device.failure.pending_calls import WaitPolicy


class Event(Protocol):
    """The backend's event: a position in a queue."""

    @property
    def done(self) -> bool:
        """Whether the queue has passed this position; does not wait."""


HostCopy = Callable[[], np.ndarray | None]


class Backend(ABC):
    """The operations of a backend; it overrides those with a default only where it differs."""

    # -- memory and arrays ------------------------------------------------------------------------

    def put(self, array: Any) -> Buffer:
        """Returns an array as a Buffer of this device; see ``put_all``."""
        return self.put_all([array])[0]

    @abstractmethod
    def put_all(
        self, arrays: Sequence[Any], addresses: Sequence[int] | None = None
    ) -> list[Buffer]:
        """Returns arrays as Buffers of this device, shared if possible, else copied.

        Host arrays are copied to a GPU. On a simulated device, contiguous NumPy arrays are shared.

        Args:
            arrays: arrays in host memory, or on this device's GPU, of dtypes that can be added.
            addresses: the address of each array's first element, if the caller knows it: other
                libraries find it faster than NumPy.
        """

    @abstractmethod
    def _array_of(self, buffer: Buffer) -> Any:
        """Returns the backend's array of ``buffer``'s memory; it keeps the block alive."""

    @abstractmethod
    def _adopt(self, array: Any, writable: bool) -> Buffer:
        """Wraps the caller's memory without waiting; raises as ``Device.adopt`` does."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Block:
        """Allocates a block from the pool, for use in the order of the compute queue."""

    def _recycle(self, raw: Any, nbytes: int) -> None:  # noqa: B027
        """Returns the memory of a freed block, which no queue uses, to the pool.

        Default: the pool takes it when the last reference to ``raw`` is dropped, as CuPy's does.
        """

    @abstractmethod
    def _trim(self) -> None:
        """Releases the pool's free memory to the system."""

    # -- work -------------------------------------------------------------------------------------

    @abstractmethod
    def _fill_zero(self, buffer: Buffer) -> None:
        """Queues a fill with zeros on the compute queue."""

    @abstractmethod
    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        """Queues a copy of a host array by ``_order``; the array is read before this returns."""

    @abstractmethod
    def _download(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        """Returns a host copy after the compute queue's work; None if the wait ended early."""

    @abstractmethod
    def _make_download(self, buffer: Buffer) -> tuple[Command, HostCopy]:
        """Returns a command that copies a small buffer to the host on the compute queue.

        The second result returns the copy; None if it is not done yet.
        """

    @abstractmethod
    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        """Queues a copy; ``dst``, ``src`` or both are on this device."""

    @abstractmethod
    def _exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: HostMove
    ) -> None:
        """Exchanges buffers with other processes by ``_order``.

        ``move`` sends and receives host arrays, and waits for the other processes.
        """

    @abstractmethod
    def _compile_kernel(self, kernel: Kernel, template: Template) -> None:
        """Compiles the kernel under a lock, unless it is compiled already."""

    @abstractmethod
    def _make_launch(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> tuple[Command, Buffer | None]:
        """Returns a command that queues a kernel over rows that all have work.

        The command can be called again. It does not keep the operands' blocks alive. The second
        result is memory that the command reads besides its operands, and keeps alive.
        """

    def run_on_host(
        self, kernel: Kernel, row: Sequence[np.ndarray], scalars: Sequence[int | float]
    ) -> bool:
        """Runs a kernel at once on one row of small host arrays, without Buffers.

        Making Buffers of three arrays of a hundred numbers takes five times as long as adding them.
        The run is recorded like any launch.

        Args:
            kernel: an elementwise kernel.
            row: 1-D arrays with dtypes that kernels know; those that are written come first.
            scalars: the scalar arguments, in the order in which the kernel declares them.

        Returns:
            False if this device does not support it; then nothing was done.
        """
        return False

    def _capture(self, devices: Sequence[Device], command_list: CommandList) -> Command:
        """Returns one command that does the work of the list on ``devices``.

        This device is the first of them. Default: a command that submits each command of the list.
        """
        return command_list.run

    # -- queues -----------------------------------------------------------------------------------

    @abstractmethod
    def _mark(self, queue: User) -> Event:
        """Records an event at the end of ``queue``, or of a caller's stream."""

    @abstractmethod
    def _wait(self, mark: Mark, queue: User) -> None:
        """Makes ``queue``, or a caller's stream, wait for a mark of another queue or stream."""

    @abstractmethod
    def _synchronize(self, wait_policy: WaitPolicy, queues: Sequence[Queue] = QUEUES) -> bool:
        """Waits on the host for these queues; returns False if the wait ended early."""

    @abstractmethod
    def _abandon(self, seconds: float) -> bool:
        """Empties all queues, for ``reset``; returns False if that takes more than ``seconds``.

        Queued work may be dropped, but all marks count as passed.
        """

    def _is_capturing(self, stream: Stream) -> bool:
        """Whether a caller's stream records a CUDA graph, or must wait for one that does.

        Called before a stream is passed to ``_mark`` or ``_wait``.

        Raises:
            DeviceMismatchError: this backend has no streams (the default).
        """
        raise DeviceMismatchError(
            f"stream={handle_of(stream):#x} was passed, but {self} has no streams: pass None"
        )

    def _exchange_on_gpu(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel], queue: Queue, move: GpuMove
    ) -> None:
        """Queues an exchange of GPU memory by ``_order``; the host does not wait."""
        raise NotImplementedError("simulated devices have no streams")

    def _call_on_stream(self, queue: Queue, call: StreamCall) -> None:
        """Calls ``call(GPU, handle of the queue's stream)`` with the GPU current."""
        raise NotImplementedError("simulated devices have no streams")

    def _hardware_name(self) -> str:
        """Returns a name of the physical device that is unique among all machines, for NCCL."""
        raise NotImplementedError("simulated devices have no hardware name")

    def _is_done(self, event: Event) -> bool:
        """Returns ``event.done`` for an event of this device; detects a failed device."""
        return event.done

    def _progress(self) -> None:  # noqa: B027  # most queues run by themselves
        """Runs queues that run only while the host waits."""

    def _activate(self) -> AbstractContextManager[object]:
        """Context manager for many calls: makes its GPU current, so that no call has to."""
        return nullcontext()

    def _is_waiting(self, queue: Queue) -> bool:
        """Whether a queue is known to wait for another's mark; False if unknown."""
        return False
