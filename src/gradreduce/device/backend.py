"""What a backend implements, and nothing else does: ``Device`` calls these and is called by all.

Whoever calls one of them has checked its arguments, and fences and records around it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .capture import Recording
from .kernel import Kernel, Template
from .memory import Block, Buffer, Mark, Queue, Row, Stream, User
from .tape import Issue
from .watch import Patience

if TYPE_CHECKING:
    from .base import Device

__all__ = ["Backend"]


class Backend(ABC):
    """The part of a device that knows its memory and its queues."""

    def address_of(self, raw: Any) -> int:
        """Of the first byte of a block's ``raw``; only where blocks are made without it."""
        raise NotImplementedError(f"{self} tells no address of {raw!r}")

    def run_on_host(
        self, kernel: Kernel, row: Sequence[np.ndarray], scalars: Sequence[int | float]
    ) -> bool:
        """A launch over one row of small host arrays, without a Buffer; done when it returns.

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

    @abstractmethod
    def _adopt(self, array: Any, stream: Stream | None, writable: bool) -> Buffer:
        """See ``Device.adopt``."""

    @abstractmethod
    def _release(self, buffer: Buffer, stream: Stream | None) -> Any:
        """See ``Device.release``."""

    @abstractmethod
    def _follow(self, stream: Stream) -> None:
        """Makes the compute queue wait for a foreign stream."""

    @abstractmethod
    def _precede(self, stream: Stream | None) -> None:
        """Makes a foreign stream, or the host, wait for the compute queue."""

    def _is_capturing(self, stream: Stream) -> bool:
        """Whether a foreign stream records a CUDA graph, or must wait for one that does."""
        return False

    @abstractmethod
    def _prepare(self, kernel: Kernel, template: Template) -> None:
        """Compiles, under a lock, what is not compiled yet."""

    @abstractmethod
    def _is_prepared(self, kernel: Kernel, template: Template) -> bool:
        """Whether a launch would compile nothing."""

    @abstractmethod
    def _recording(self, devices: Sequence[Device]) -> Recording:
        """What keeps the work of these devices, this one first; fresh."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Block:
        """A block of the pool, to be used in the order of the compute queue."""

    @abstractmethod
    def _recycle(self, raw: Any, nbytes: int) -> None:
        """Takes back what a dead block of the pool held; no queue uses it any more."""

    @abstractmethod
    def _trim(self) -> None:
        """Gives the pool's free memory to the system."""

    @abstractmethod
    def _fill_fresh(self, buffer: Buffer) -> None:
        """Makes what is read unwritten show, where that is asked for; on the compute queue."""

    @abstractmethod
    def _fill_zero(self, buffer: Buffer) -> None:
        """Queues zeros, on the compute queue."""

    @abstractmethod
    def _upload(self, dst: Buffer, array: np.ndarray, queue: Queue) -> None:
        """Queues a copy of a host array, which is read before this returns."""

    @abstractmethod
    def _download(self, buffer: Buffer, patience: Patience) -> np.ndarray | None:
        """A host copy, once the compute queue is empty; None if the patience was over first."""

    @abstractmethod
    def _copy(self, dst: Buffer, src: Buffer, queue: Queue) -> None:
        """Queues a copy; one end is this device's."""

    @abstractmethod
    def _resolved(
        self,
        kernel: Kernel,
        template: Template,
        rows: Sequence[Row],
        scalars: Sequence[int | float],
        queue: Queue,
    ) -> Issue:
        """What queues a kernel over rows that all have work, each time it is called.

        It keeps what it needs to be called again, but not the operands' blocks.
        """

    @abstractmethod
    def _mark(self, queue: User) -> Any:
        """The backend's token for the end of what ``queue``, or a caller's stream, holds.

        None for a caller's stream that is capturing: it would belong to the capture for ever.
        """

    @abstractmethod
    def _passed(self, event: Any) -> bool:
        """Whether a queue has come by that token; never waits."""

    @abstractmethod
    def _wait(self, mark: Mark, queue: Queue) -> None:
        """Queues a wait for another queue's mark."""

    def _led(self, others: Iterable[Device]) -> list[Device]:
        """Those whose compute queues must be told to wait for this one's now.

        The rest wait by themselves for what it holds by then, once they are given anything.
        """
        return [other for other in others if other is not self]

    def _unjoined(self, others: Iterable[Device]) -> list[Device]:
        """Those whose compute queues may hold what this one's does not wait for yet."""
        return [other for other in others if other is not self]

    @property
    def _is_led(self) -> bool:
        """Whether it trails anybody."""
        return False

    def _catch_up(self) -> None:  # noqa: B027  # who trails nobody has nothing to do
        """Its compute queue waits now for whom it trails."""

    def _comes_behind(self, device: Device, queue: Queue) -> bool:
        """Whether what its compute queue is given next comes behind all that queue holds now.

        False also where it is not known.
        """
        return False

    @abstractmethod
    def _synchronize(self, patience: Patience) -> bool:
        """The host waits for both queues; False if the patience was over first."""

    def _reached(self, event: Any) -> bool:
        """As ``_passed``, for a mark of this device: one that never will is noticed."""
        return self._passed(event)

    def _urge(self) -> None:  # noqa: B027  # most work by themselves
        """Has queues go on that otherwise do so only while the host waits."""

    def _is_waiting(self, queue: Queue) -> bool:
        """Whether a queue is known to wait for a mark of another; False where nobody can tell."""
        return False

    @abstractmethod
    def _abandon(self, seconds: float) -> bool:
        """For ``reset``: no queue holds anything any more, within so many seconds, or False.

        What was queued need not have been done, but all marks count as passed.
        """
