"""Sixteen worker threads: each pull contains whole pushes, in one order for all."""

import threading

import numpy as np
import pytest
from optim.agn.team import BOTH_IMPLEMENTATIONS, pair
from support.failing_operations import fast_thread_switching

import gradreduce as gr
from gradreduce.optim.agn.push import PushPlan

NUM_WORKERS, NUM_PUSHES, LIMIT_S = 16, 3, 60.0
WIDTHS = {"one": 3, "two": 40, "three": 1, "four": 700}


@pytest.fixture(autouse=True)
def switching():
    with fast_thread_switching():
        yield


@pytest.fixture
def noted(monkeypatch):
    """Calls functions in each push, in the thread of its worker."""
    functions, run = [], PushPlan.run

    def running(plan, *given):
        for function in functions:
            function()
        return run(plan, *given)

    monkeypatch.setattr(PushPlan, "run", running)
    return functions


class Run:
    """Every push adds one to the pushing worker's row, of every variable.

    Attributes:
        order: the workers in the order of their pushes.
        pulled: for each worker and each of its pushes, the pulled variables by name.
    """

    def __init__(self, mesh, noted, *, by_rows=False):
        self.by_rows = by_rows
        self.start = {name: np.full((NUM_WORKERS, width), place, "float32")
                      for place, (name, width) in enumerate(WIDTHS.items())}  # fmt: skip
        center = gr.AGNCenter(mesh[[0, len(mesh) - 1]])
        self.team = pair(mesh, 2, lambda: gr.GradientDescentOptimizer(0.5), self.start,
                         NUM_WORKERS, center=center)  # fmt: skip
        homes = {var.devices for var in center.variables()}
        assert len(homes) == 2
        self.order, self.pulled = [], [[] for _ in self.team]
        self._thread_state = threading.local()
        noted.append(lambda: self.order.append(self._thread_state.place))
        self._meet = threading.Barrier(NUM_WORKERS)
        threads = [center.start_worker(place, lambda place=place: self.work(place))
                   for place in range(NUM_WORKERS)]  # fmt: skip
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "deadlock: a worker did not end"

    def work(self, place):
        self._thread_state.place, worker = place, self.team[place]
        grads = {name: np.zeros_like(value) for name, value in self.start.items()}
        for name, grad in grads.items():
            grad[place] = -2
            if self.by_rows:  # all of them: each is taken out and put back
                grads[name] = gr.IndexedSlices(grad, np.arange(NUM_WORKERS))
        self._meet.wait(LIMIT_S)
        for _ in range(NUM_PUSHES):
            assert worker.step(grads) is False
            assert worker.step(grads) is True
            self.pulled[place].append(worker.local)

    def counts(self, name, value):
        """The number of pushes of each worker in a variable: all elements of its row have it."""
        found = value - self.start[name]
        assert (found == found[:, :1]).all(), "torn"
        return found[:, 0].astype(int).tolist()


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("by_rows", [False, True])
def test_every_pull_is_the_start_plus_a_prefix_of_the_pushes(mesh, noted, by_rows):
    run = Run(mesh, noted, by_rows=by_rows)
    assert sorted(run.order) == sorted(list(range(NUM_WORKERS)) * NUM_PUSHES)
    held, turn = [0] * NUM_WORKERS, [0] * NUM_WORKERS
    for place in run.order:
        held[place] += 1
        for name, value in run.pulled[place][turn[place]].items():
            assert run.counts(name, value) == held
        turn[place] += 1
    for name, value in run.team[0].center.items():
        assert run.counts(name, value) == [NUM_PUSHES] * NUM_WORKERS
