"""The backend interface: the operations that a backend implements.

``Device`` checks arguments, waits where it must and records; then it calls these. ``README.md``
beside this file lists what every backend promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradreduce.errors import DeviceMismatchError

from .buffer import Block, Buffer, Mark, Queue, Row, Stream, User, handle_of
from .command_list import Command, CommandList
from .kernel import Kernel, Template
from .op_log import QUEUES

if TYPE_CHECKING:
    from .device import Device
    from .pending_calls import WaitPolicy


class Event(Protocol):
    """The backend's event: a position in a queue."""

    @property
    def done(self) -> bool:
        """Whether the queue has passed it; does not wait."""


class Backend(ABC):
    """The operations that a backend implements; those with a default only where it differs."""

    # -- memory and arrays ------------------------------------------------------------------------

    @abstractmethod
    def put(self, array: Any, address: int | None = None) -> Buffer:
        """Returns ``array`` as a Buffer of this device, shared if possible, else copied.

        Args:
            array: in host memory, or on this device's GPU.
            address: of its first element, from a caller who knows it: a library may know it faster
                than NumPy does.
        """

    @abstractmethod
    def _array_of(self, buffer: Buffer) -> Any:
        """Returns the backend's array of ``buffer``'s memory; it keeps the block alive."""

    @abstractmethod
    def _adopt(self, array: Any, writable: bool) -> Buffer:
        """Wraps the caller's memory; raises as ``Device.adopt`` does. Waits for nothing."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Block:
        """Allocates a block of the pool, for use in the order of the compute queue."""

    def _recycle(self, raw: Any, nbytes: int) -> None:  # noqa: B027
        """Returns a freed block's memory to the pool; no queue uses it any more.

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
        """Queues a copy of a host array, which is read before this returns."""

    @abstractmethod
    def _download(self, buffer: Buffer, wait_policy: WaitPolicy) -> np.ndarray | None:
        """Returns a host copy after the compute queue's work; None if the wait ended first."""

    @abstractmethod
    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        """Queues a copy; one end is this device's."""

    @abstractmethod
    def _prepare(self, kernel: Kernel, template: Template) -> None:
        """Compiles, under a lock, what is not compiled yet."""

    @abstractmethod
    def _resolved(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> Command:
        """Returns a command that queues a kernel over rows that all have work.

        It keeps what it needs to be called again, but not the operands' blocks.
        """

    def run_on_host(
        self, kernel: Kernel, row: Sequence[np.ndarray], scalars: Sequence[int | float]
    ) -> bool:
        """Runs a kernel on one row of small host arrays, without Buffers, before it returns.

        Making Buffers of three arrays of a hundred numbers takes five times as long as adding
        them. Recorded as any launch.

        Args:
            kernel: an elementwise one.
            row: flat arrays of the elements that kernels know, the written ones first.
            scalars: as the kernel declares them.

        Returns:
            False if this device does not do that; then nothing was done.
        """
        return False

    def _captured(self, devices: Sequence[Device], command_list: CommandList) -> Command:
        """Returns a command that does what the list does, on these devices, this one first.

        Default: it submits each command of the list.
        """
        return command_list.run

    # -- queues -----------------------------------------------------------------------------------

    @abstractmethod
    def _mark(self, queue: User) -> Event:
        """Records an event at the end of ``queue``, or of a caller's stream."""

    @abstractmethod
    def _wait(self, mark: Mark, queue: User) -> None:
        """Makes ``queue``, or a caller's stream, wait for another queue's or stream's mark."""

    @abstractmethod
    def _synchronize(self, wait_policy: WaitPolicy, queues: Sequence[Queue] = QUEUES) -> bool:
        """Waits on the host for these queues; False if the wait ended first."""

    @abstractmethod
    def _abandon(self, seconds: float) -> bool:
        """Empties all queues, for ``reset``; False if that takes more than ``seconds``.

        What was queued need not have been done, but all marks count as passed.
        """

    def _is_capturing(self, stream: Stream) -> bool:
        """Whether a caller's stream records a CUDA graph, or must wait for one that does.

        Asked before ``_mark`` and ``_wait`` get a stream.

        Raises:
            DeviceMismatchError: no stream is this backend's, which is the default.
        """
        raise DeviceMismatchError(
            f"stream={handle_of(stream):#x} was passed, but {self} has no streams"
        )

    def _on_stream(self, queue: Queue, call: Callable[[int], None]) -> None:
        """Calls with the handle of a queue's stream, to which the call submits work."""
        raise NotImplementedError("simulated devices have no streams")

    def _hardware_name(self) -> str:
        """Names the physical device among those of all machines, where NCCL can use it."""
        raise NotImplementedError("simulated devices are no hardware")

    def _reached(self, event: Event) -> bool:
        """Returns ``event.done``, for an event of this device; notices a failed device."""
        return event.done

    def _progress(self) -> None:  # noqa: B027  # most work by themselves
        """Runs queues that otherwise run only while the host waits."""

    def _activate(self) -> AbstractContextManager[object]:
        """Context of many calls: its GPU is the current one, so that none of them switches."""
        return nullcontext()

    def _is_waiting(self, queue: Queue) -> bool:
        """Whether a queue is known to wait for another's mark; False if unknown."""
        return False

    # -- waits that a backend leaves out ----------------------------------------------------------

    def _needs_order(self) -> bool:
        """Whether its queues must wait for each other; not where work is done when submitted."""
        return True

    def _others(self, devices: Iterable[Device]) -> list[Device]:
        """The devices whose compute queue is another one than this one's."""
        return [each for each in devices if each is not self]

    def _comes_behind(self, device: Device, queue: Queue) -> bool:
        """Whether later work of its compute queue runs after all that queue holds now.

        False also where it is not known.
        """
        return False
