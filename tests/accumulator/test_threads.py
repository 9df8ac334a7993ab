"""Many threads: every added gradient is in exactly one take, and no call waits forever."""

import itertools
import threading
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
from accumulator.kinds import Dense
from support.failing_operations import fast_thread_switching

import gradreduce as gr
from gradreduce.accumulator.state import hold_locks
from gradreduce.accumulator.take_queue import close
from gradreduce.errors import CancelledError, DeadlineExceededError

NUM_APPLIERS = 48
NUM_CONSUMERS = 16
LONG = (pytest.mark.exhaustive, pytest.mark.slow)
LONG_S = 180.0  # a run takes ten seconds on an idle machine


@pytest.fixture(autouse=True)
def switching():
    with fast_thread_switching():
        yield


@contextmanager
def opened(placement, implementation="numpy"):
    """A mesh that is closed unless the test fails: after a deadlock, a close would not return."""
    mesh = gr.open_mesh(placement, backend="sim", kernels=implementation, strict=True)
    yield mesh
    mesh.close()


class Watched(deque):
    """A queue of takes that records, in order, which joined and completed; its lock is held.

    Attributes:
        joined: every take, with the thread that waits for it.
        served: the completed takes, and whether each was first in the queue.
    """

    def __init__(self):
        super().__init__()
        self.joined, self.served = [], []

    def append(self, pending_take):
        super().append(pending_take)
        self.joined.append((pending_take, threading.get_ident()))

    def remove(self, pending_take):
        if pending_take.taken:
            self.served.append((pending_take, self[0] is pending_take))
        super().remove(pending_take)


def given(acc, grad):
    """The gradient; as rows for a sparse accumulator, one of them in two terms."""
    if isinstance(acc, gr.ConditionalAccumulator):
        return grad
    number = np.flatnonzero(grad)[0]
    second = number + NUM_APPLIERS
    return gr.IndexedSlices(np.array([[grad[second]], [1.5], [-0.5]]), [second, number, number])


def whole(taken):
    """A result, or the sum of a state, as an array of all elements."""
    if isinstance(taken, dict):
        taken = gr.IndexedSlices(taken["values"], taken["indices"])
    if isinstance(taken, gr.IndexedSlices):
        made = np.zeros(2 * NUM_APPLIERS)
        made[taken.indices] = taken.values[:, 0]
        return made
    return np.broadcast_to(taken, 2 * NUM_APPLIERS)


class Run:
    """Appliers and consumers that start together; records the take of every gradient.

    They pass the accumulators in either order; some consumers take from one alone.

    The k-th gradient of an applier has 1 at the applier's index in the first half, and k at its
    index in the second half. An applier's gradients are added in order, so the counts of earlier
    takes determine which gradients a take must contain.

    Args:
        call_threads: starts the threads.
        accumulators: accumulators with reduction type SUM.
        num_each: the number of applies of each applier.
    """

    def __init__(self, call_threads, accumulators, num_each):
        self.accumulators, self.num_each = accumulators, num_each
        self.states = [acc.accumulator_ref for acc in accumulators]
        for state in self.states:
            state.queue = Watched()
        self.kept = [[] for _ in range(NUM_APPLIERS)]
        self.results = {}  # of the takes of each thread, [accumulator or None]
        self._start = threading.Barrier(NUM_APPLIERS + NUM_CONSUMERS)
        consumers = [call_threads.start(self.take, number) for number in range(NUM_CONSUMERS)]
        appliers = [call_threads.start(self.apply, number) for number in range(NUM_APPLIERS)]
        for call in appliers:
            call.result(LONG_S)
        # The rest is not enough for the first take, so takes would wait forever.
        self.left, self.counts, self.steps = [], [], []
        with hold_locks(self.states):
            for acc, state in zip(accumulators, self.states, strict=True):
                totals = acc.state_dict()["partial_sums"]
                self.left.append(sum(whole(total) for total in totals if total is not None))
                self.counts.append(state.count)
                self.steps.append(state.step)
                close(state)  # this may complete a take from the next one alone
        for call in consumers:
            with pytest.raises(CancelledError):
                call.result()

    # -- what the threads do ------------------------------------------------------------------

    def apply(self, number):
        grad = np.zeros(2 * NUM_APPLIERS)
        grad[number] = 1
        self._start.wait(30)
        for place in range(self.num_each):
            grad[NUM_APPLIERS + number] = place  # not kept: it may be written again
            step = max(acc.global_step for acc in self.accumulators) + place % 3
            self.kept[number] += [place] * self.apply_one(number, grad, step)

    def ordered(self, number):
        return self.accumulators[:: -1 if number % 2 else 1]

    def apply_one(self, number, grad, step):
        """Applies it from one replica or from all; returns the number of gradients added."""
        mesh, accumulators = self.states[0].devices[0].mesh, self.ordered(number)
        grads, count = [given(acc, grad) for acc in accumulators], 1
        if number % 5 == 0:
            count = len(mesh)
            grads = [gr.PerReplica([each] * count, mesh) for each in grads]
        with gr.replica(number % len(mesh)):
            return count * gr.apply_grads(accumulators, grads, step)

    def take(self, number):
        mine = self.results[threading.get_ident()] = []
        self._start.wait(30)
        while True:
            try:
                mine.append(self.take_one(number, None if number % 4 else 0.001))
            except DeadlineExceededError:
                mine.append(None)

    def take_one(self, number, timeout):
        accumulators = self.ordered(number)[: 1 if number % 3 == 0 else 2]
        return gr.take_grads(accumulators, 1 + 3 * number, timeout=timeout)

    # -- what must have happened --------------------------------------------------------------

    def check(self):
        """Checks that nothing is lost or taken twice, and that takes completed in order."""
        for place, state in enumerate(self.states):
            sums = self.in_order(place, state)
            assert self.steps[place] == len(sums) > 0
            self.account([*sums, self.left[place]], self.counts[place])

    def in_order(self, place, state):
        """The sums that takes returned, in the order of the takes."""
        joined = [pending_take for pending_take, _ in state.queue.joined]
        served = [pending_take for pending_take, _ in state.queue.served]
        assert all(was_head for _, was_head in state.queue.served)
        assert served == [pending_take for pending_take in joined if pending_take.taken], (
            "first come, first served"
        )
        # Takes that were cancelled at the end were here in the order of their thread.
        results = {thread: iter(mine) for thread, mine in self.results.items()}
        handed = {
            pending_take: next(results[thread], None) for pending_take, thread in state.queue.joined
        }
        sums = []
        for pending_take in served:
            taken = handed[pending_take][pending_take.states.index(state)]
            copies = taken.values if isinstance(taken, gr.Mirrored) else [taken]
            copies = [whole(copy) for copy in copies]
            assert all((copies[0] == copy).all() for copy in copies[1:])
            assert copies[0][:NUM_APPLIERS].sum() >= pending_take.num_required
            sums.append(copies[0])
        return sums

    def account(self, sums, num_left):
        """Checks that every applier's gradients are in the sums in order, each once."""
        sums = np.array([np.broadcast_to(total, 2 * NUM_APPLIERS) for total in sums])
        assert sums[-1, :NUM_APPLIERS].sum() == num_left
        upto = np.cumsum(sums[:, :NUM_APPLIERS], axis=0).astype(int)
        for applier, kept in enumerate(self.kept):
            numbers = np.array([0, *itertools.accumulate(kept)])
            assert upto[-1, applier] == len(numbers) - 1
            wanted = np.diff(numbers[upto[:, applier]], prepend=0)
            assert (wanted == sums[:, NUM_APPLIERS + applier]).all()


HOMES = {
    "device": lambda mesh: mesh.devices[:1],
    "mesh": lambda mesh: [mesh],
    "two devices": lambda mesh: mesh.devices[1::-1],
    "device and mesh": lambda mesh: [mesh.devices[1], mesh[1:]],
}


@pytest.mark.parametrize("num", [40, pytest.param(2100, marks=LONG)])
@pytest.mark.parametrize("homes", HOMES)
def test_sixty_four_threads(implementation, call_threads, homes, kind, num):
    """On one accumulator, or on a dense one and another together."""
    with opened([0, 0, 1], implementation) as mesh:
        where = HOMES[homes](mesh)
        accumulators = [
            each.make("float64", reduction_type="SUM", device=home)
            for each, home in zip((Dense, kind)[-len(where) :], where, strict=True)
        ]
        Run(call_threads, accumulators, num).check()


def test_a_waiting_take_gets_no_more_than_it_needs_from_applies_of_one_step(
    accumulator, call_threads
):
    """The call that adds the last gradient also completes the take, so the third is stale."""
    acc = accumulator(reduction_type="SUM")
    for step in range(60):
        take = call_threads.waiting(acc.take_grad, 2)
        start = threading.Barrier(3)

        def apply(start=start, step=step):
            start.wait(30)
            return acc.apply_grad([1.0], step)

        kept = [call.result() for call in [call_threads.start(apply) for _ in range(3)]]
        assert sorted(kept) == [False, True, True]
        assert take.result().tolist() == [2.0]
        assert (acc.num_accumulated(), acc.num_dropped) == (0, step + 1)
