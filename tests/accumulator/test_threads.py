"""Many threads at once: every kept gradient is in exactly one take, and nobody waits for ever."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator.state import locked
from gradreduce.errors import CancelledError

NUM_APPLIERS = 12
NUM_TAKERS = 4
NUM_EACH = 140  # applies of each applier: in three tests on two faces, 10,080 in all


@pytest.fixture(autouse=True)
def restless():
    """Threads change places a hundred times more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


def one_hot(place, size):
    """A gradient that can be recognised in any sum."""
    made = np.zeros(size, "float32")
    made[place] = 1
    return made


class Run:
    """Appliers and takers that start together.

    Attributes:
        kept: gradients that were kept, by place.
        taken: ``taken[take][accumulator]``, the sums that were handed out.
    """

    def __init__(self, crew, accumulators):
        self.accumulators = accumulators
        self.size = NUM_APPLIERS * NUM_EACH
        self.kept = np.zeros(self.size, bool)
        self.taken = []
        self._start = threading.Barrier(NUM_APPLIERS + NUM_TAKERS)
        takers = [crew.start(self.take, number) for number in range(NUM_TAKERS)]
        appliers = [crew.start(self.apply, number) for number in range(NUM_APPLIERS)]
        for call in appliers:
            call.result()
        # What is left is not enough for whoever is head: they would wait for ever.
        with locked([acc.accumulator_ref for acc in accumulators]):
            self.left = [
                [total.numpy() for total in acc.accumulator_ref.totals if total is not None]
                for acc in accumulators
            ]
            self.counts = [acc.num_accumulated() for acc in accumulators]
            self.steps = [acc.global_step for acc in accumulators]
            for acc in accumulators:
                acc.close()
        for call in takers:
            with pytest.raises(CancelledError):
                call.result()

    def apply(self, number):
        mine = range(number, self.size, NUM_APPLIERS)
        grads = [one_hot(place, self.size) for place in mine]
        self._start.wait(30)
        for place, grad in zip(mine, grads, strict=True):
            step = max(acc.global_step for acc in self.accumulators)
            self.kept[place] = self.apply_one(number, grad, step)

    def apply_one(self, number, grad, step):
        (acc,) = self.accumulators
        return acc.apply_grad(grad, step)

    def take(self, number):
        self._start.wait(30)
        while True:
            self.taken.append(self.take_one(number))

    def take_one(self, number):
        (acc,) = self.accumulators
        return [acc.take_grad(1 + number)]

    def check(self, each=1):
        """Nothing is lost and nothing twice: every element of the sums is 0 or 1."""
        assert set(self.steps) == {len(self.taken)}
        for place in range(len(self.accumulators)):
            assert self.counts[place] * each < self.size
            total = np.zeros(self.size, "float32")
            for sums in self.taken:
                assert sums[place].sum() >= 1
                total += sums[place]
            for left in self.left[place]:
                total += left
            assert (total == self.kept).all()
            assert sum(left.sum() for left in self.left[place]) == self.counts[place]


def test_sixteen_threads_on_one_accumulator(accumulator, crew):
    run = Run(crew, [accumulator(reduction_type="SUM")])
    run.check()
    assert len(run.taken) > 0


class MeanRun(Run):
    """Means of one accumulator over a mesh, its gradients from every replica."""

    def apply_one(self, number, grad, step):
        (acc,) = self.accumulators
        with gr.replica(number % 4):
            return acc.apply_grad(grad, step)

    def take_one(self, number):
        (acc,) = self.accumulators
        (mean, *others) = acc.take_grad(1 + number).values
        assert all((mean == other).all() for other in others)
        count = np.count_nonzero(mean)
        assert count >= 1 + number
        assert (mean[mean != 0] == np.float32(1) / np.float32(count)).all()
        return [(mean != 0).astype("float32")]


def test_sixteen_threads_over_a_mesh(face, crew):
    with gr.open_mesh([0, 0, 1, 1], backend="sim", kernels=face, strict=True) as mesh:
        MeanRun(crew, [gr.ConditionalAccumulator("float32", device=mesh)]).check()


class JointRun(Run):
    """Two accumulators; half of the threads name them in the other order."""

    def ordered(self, number, values):
        return values[::-1] if number % 2 else list(values)

    def apply_one(self, number, grad, step):
        return gr.apply_grads(self.ordered(number, self.accumulators), [grad, grad], step)

    def take_one(self, number):
        taken = gr.take_grads(self.ordered(number, self.accumulators), 1 + number // 2)
        return self.ordered(number, taken)


def test_sixteen_threads_on_two_accumulators_together(accumulator, crew):
    run = JointRun(crew, [accumulator(reduction_type="SUM") for _ in range(2)])
    run.check()
    assert all((left == right).all() for left, right in run.taken)


def test_a_waiting_take_gets_no_more_than_it_needs_from_applies_of_one_step(accumulator, crew):
    """It is served by the call that satisfies it, in one step with that: the third is stale."""
    acc = accumulator(reduction_type="SUM")
    for step in range(60):
        take = crew.waiting(acc.take_grad, 2)
        start = threading.Barrier(3)

        def apply(start=start, step=step):
            start.wait(30)
            return acc.apply_grad([1.0], step)

        kept = [call.result() for call in [crew.start(apply) for _ in range(3)]]
        assert sorted(kept) == [False, True, True]
        assert take.result().tolist() == [2.0]
        assert (acc.num_accumulated(), acc.num_dropped) == (0, step + 1)
