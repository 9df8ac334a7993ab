"""Jobs of an all-reduce algorithm, and the stages in which they overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gradreduce.device import Buffer, Queue

__all__ = ["Job", "Stage", "Steps", "run_stages"]

# The work of one stage, in steps: at each yield it waits for transfers, and others may work.
Steps = Iterator[None]


@dataclass(frozen=True)
class Job:
    """The reduction of one pack: every out becomes the sum of all inputs, divided.

    Attributes:
        inputs: one for each replica, in mesh order, on its device; all of one size and dtype.
        outs: one for each replica, on its device. Each is its input exactly, or new memory.
        divisor: of the sum; 1 divides nothing.
    """

    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    divisor: float = 1

    def part(self, start: int, stop: int) -> Job:
        """Returns the job for the elements from ``start`` to ``stop``."""
        if start == 0 and stop == self.inputs[0].size:
            return self
        starts, shapes = (start,), ((stop - start,),)
        return Job(
            tuple([buffer.parts(starts, shapes)[0] for buffer in self.inputs]),
            tuple([buffer.parts(starts, shapes)[0] for buffer in self.outs]),
            self.divisor,
        )


def _nothing() -> None:
    """Does nothing, where nothing has to be packed or unpacked."""


@dataclass(frozen=True)
class Stage:
    """Packs that are packed, transferred and unpacked together.

    Attributes:
        jobs: their indices in the list of jobs.
        pack: submits the launches that fill the jobs' inputs, on the compute queues.
        unpack: submits the launches that copy the sums out of the jobs' outs.
        watched: context around each step, which labels it in errors and the flight record.
    """

    jobs: Sequence[int]
    pack: Callable[[], None] = _nothing
    unpack: Callable[[], None] = _nothing
    watched: Callable[[], AbstractContextManager[object]] = nullcontext


def run_stages(
    stages: Sequence[Stage], num_jobs: int, steps_of: Callable[[Sequence[int], Queue], Steps]
) -> None:
    """Runs all stages so that one is packed while the one before it is transferred.

    Transfers run on the transfer queues; packing, sums and unpacking on the compute queues. There
    a stage is packed *before* the last step of the stage ahead of it, which waits for transfers
    and would delay all work behind it. A single stage has nothing to overlap with: it stays on
    the compute queues and needs no waits between the two.

    Args:
        stages: in order; none means one of all jobs, with nothing to pack or unpack.
        num_jobs: how many jobs there are.
        steps_of: called with the jobs of a stage and the queue for transfers.
    """
    stages = stages or [Stage(range(num_jobs))]
    queue: Queue = "transfer" if len(stages) > 1 else "compute"
    waiting = list(reversed(stages))
    running: list[tuple[Stage, Steps]] = []
    while waiting or running:
        if waiting:
            stage = waiting.pop()
            running.insert(0, (stage, _steps(stage, queue, steps_of)))
        running = [(stage, steps) for stage, steps in running if _advance(stage, steps)]


def _steps(stage: Stage, queue: Queue, steps_of: Callable[[Sequence[int], Queue], Steps]) -> Steps:
    stage.pack()
    yield from steps_of(stage.jobs, queue)
    stage.unpack()


def _advance(stage: Stage, steps: Steps) -> bool:
    """Runs one step; returns False if it was the last."""
    with stage.watched():
        for _ in steps:
            return True
        return False
