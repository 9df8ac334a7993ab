"""The processes of a mesh, as this folder sees them, and the data that travels between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .memory.buffer import Buffer
    from .run.collective import Collective

# The rank of another process, and a flat array of bytes to send to it or receive from it.
Message = tuple[int, np.ndarray]
# The rank of another process, and a buffer to send to it or receive from it.
Parcel = tuple[int, "Buffer"]
# Sends and receives host arrays.
HostMove = Callable[[Sequence[Message], Sequence[Message]], None]
# Queues work; the arguments are the GPU and the handle of its stream.
StreamCall = Callable[[int, int], None]
# Queues sends and receives of GPU memory; the last arguments are the GPU and its stream handle.
GpuMove = Callable[[Sequence[Parcel], Sequence[Parcel], int, int], None]


class Processes(ABC):
    """The processes of a mesh; ``comm.ProcessGroup`` has all that calls over processes need.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of processes.
        timeout: seconds that a call waits for another process, unless the call has an earlier
            deadline.
        counts: the number of logical devices of each process.
        move_on_gpu: the function that moves GPU memory; None: it moves through host memory.
        collective: the library's collectives over the GPUs of all processes; None: there are none.
    """

    rank: int
    size: int
    timeout: float
    counts: tuple[int, ...]
    move_on_gpu: GpuMove | None = None
    collective: Collective | None = None

    @abstractmethod
    def leave(self, failure: str | None, seconds: float | None = None) -> None:
        """Tells the other processes that this one leaves, waits until they leave, and closes.

        A process whose mesh has failed does not wait.

        Args:
            failure: why the mesh has failed; None: it has not.
            seconds: how long to wait; ``timeout`` if that is shorter.

        Raises:
            CollectiveError: another process has not left in time, or has ended without leaving.
        """

    @abstractmethod
    def tell_failure(self, reason: str) -> None:
        """Tells the other processes why the mesh of this process has failed."""

    @abstractmethod
    def describe_late(self, seconds: float, *, asks: bool = False) -> str | None:
        """Describes processes that have not made this one's last call; None if all have.

        Args:
            seconds: for how long this process has waited.
            asks: whether to describe those that have made it but do not answer now; may take a
                second.
        """

    @abstractmethod
    def flight_record(self) -> dict[str, Any]:
        """Returns this process and its last calls as JSON values."""


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
