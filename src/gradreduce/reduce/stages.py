"""What an all-reduce algorithm is asked to do, and in which stages; never does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gradreduce.device import Buffer, Queue

__all__ = ["Job", "Stage", "Steps", "run_stages"]

# What one stage does, in steps: where it yields, it waits for what travels, and another may work.
Steps = Iterator[None]


@dataclass(frozen=True)
class Job:
    """One pack: every out becomes the sum of all inputs, divided.

    Attributes:
        inputs: one for each replica, in mesh order, on its device; all of one size and dtype.
        outs: one for each replica, on its device. Each is its input exactly, or new memory.
        divisor: of the sum; 1 divides nothing.
    """

    inputs: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    divisor: float = 1

    def part(self, start: int, stop: int) -> Job:
        """The job for the elements from ``start`` to ``stop``."""
        if start == 0 and stop == self.inputs[0].size:
            return self
        starts, shapes = (start,), ((stop - start,),)
        return Job(
            tuple([buffer.parts(starts, shapes)[0] for buffer in self.inputs]),
            tuple([buffer.parts(starts, shapes)[0] for buffer in self.outs]),
            self.divisor,
        )


def _nothing() -> None:
    """Nothing has to be moved."""


@dataclass(frozen=True)
class Stage:
    """Packs that are gathered together, travel together and are spread together.

    Attributes:
        jobs: their places in the list of jobs.
        pack: gives the compute queues what fills the jobs' inputs.
        unpack: gives them what takes the sums out of the jobs' outs.
        watched: around whatever is given for it: who watches wants to know for what it is.
    """

    jobs: Sequence[int]
    pack: Callable[[], None] = _nothing
    unpack: Callable[[], None] = _nothing
    watched: Callable[[], AbstractContextManager[object]] = nullcontext


def run_stages(
    stages: Sequence[Stage], num_jobs: int, steps_of: Callable[[Sequence[int], Queue], Steps]
) -> None:
    """Gives all stages to the devices, so that one is gathered while the one before it travels.

    What travels does so on the transfer queues, what is gathered, added up and spread works on the
    compute queues. There a stage's gathering is given *before* the last step of the stage ahead of
    it, which waits for what travels and would hold up all that is behind it. A lone stage has
    nothing to overlap with: it stays on the compute queues and needs no fence between the two.

    Args:
        stages: in order; none means one of all jobs, with nothing to gather or to spread.
        num_jobs: how many jobs there are.
        steps_of: called with the jobs of a stage and the queue on which to travel.
    """
    stages = stages or [Stage(range(num_jobs))]
    queue: Queue = "transfer" if len(stages) > 1 else "compute"
    waiting = list(reversed(stages))
    running: list[tuple[Stage, Steps]] = []
    while waiting or running:
        if waiting:
            stage = waiting.pop()
            running.insert(0, (stage, _steps(stage, queue, steps_of)))
        running = [(stage, steps) for stage, steps in running if _goes_on(stage, steps)]


def _steps(stage: Stage, queue: Queue, steps_of: Callable[[Sequence[int], Queue], Steps]) -> Steps:
    stage.pack()
    yield from steps_of(stage.jobs, queue)
    stage.unpack()


def _goes_on(stage: Stage, steps: Steps) -> bool:
    """Takes one step; False if it was the last."""
    with stage.watched():
        for _ in steps:
            return True
        return False
