"""The interface of an all-reduce algorithm: one class, in a file of its own.

``algorithms.ALGORITHMS`` names the classes. The pipeline makes one instance for each list of
devices, packs a stage, runs its steps, and unpacks it; an algorithm only adds buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gradreduce.device import Buffer, Device, DType, Queue

from .reduction_groups import ReductionGroups

# The work of one stage, in steps: at each yield it waits for transfers, and others may work.
Steps = Iterator[None]


@dataclass(frozen=True)
class Job:
    """The reduction of one pack: every out becomes the sum of all inputs, divided.

    Attributes:
        inputs: one for each replica, in mesh order, on its device; all of one size and dtype.
        outs: one for each replica, on its device. Each is its input exactly, or no input's memory;
            on simulated devices it may be another replica's input, if a caller asks for that.
        divisor: of the sum; 1 divides nothing.
    """

    inputs: Sequence[Buffer]
    outs: Sequence[Buffer]
    divisor: float = 1

    def part(self, start: int, stop: int) -> Job:
        """Returns the job for the elements from ``start`` to ``stop``."""
        starts, shapes = (start,), ((stop - start,),)
        return Job(
            [buffer.parts(starts, shapes)[0] for buffer in self.inputs],
            [buffer.parts(starts, shapes)[0] for buffer in self.outs],
            self.divisor,
        )


class Algorithm(ABC):
    """An all-reduce algorithm for the replicas on one list of devices.

    Attributes:
        devices: of the replicas, in order.
        in_place: whether inputs may be outs: nothing is allocated after the first launch, so that
            a failure before it leaves them unchanged.
        reads_peers: whether launches access inputs and outs on other physical devices.

    Args:
        devices: see above.
        reduction_groups: of an algorithm that ``has_groups``; None: its default.

    Raises:
        ValueError: ``reduction_groups`` names another number of replicas.
        BackendUnavailableError: these devices need a library that is missing.
    """

    has_groups = False
    in_place = True
    reads_peers = False

    def __init__(
        self, devices: Sequence[Device], reduction_groups: ReductionGroups | None = None
    ) -> None:
        self.devices = tuple(devices)

    @abstractmethod
    def compile(self, wire: DType, total: DType) -> None:
        """Compiles all kernels for inputs of ``wire`` and outs of ``total``; may connect devices.

        Not called while a lock is held; if it fails, nothing was launched.
        """

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> Callable[[Sequence[int], Queue], Steps]:
        """Allocates what all jobs need, and launches nothing.

        Returns:
            A function that returns the steps of a stage. Its arguments are the indices of the
            stage's jobs, and the queue for transfers. Sums run on the compute queues.
        """
