"""Many threads on sparse accumulators: each row of each added gradient is in one take.

Also that no cycle leaves memory behind, whatever rows it touched.
"""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator.state import hold_locks
from gradreduce.accumulator.take_queue import close
from gradreduce.errors import CancelledError

NUM_APPLIERS = 12
NUM_CONSUMERS = 4
NUM_EACH = 50
HOT = 10_000  # a row that every gradient touches
SIZE = NUM_APPLIERS * NUM_EACH


@pytest.fixture(autouse=True)
def fast_thread_switching():
    """Makes Python switch threads a hundred times more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


def gradient(place):
    """A gradient with 2, in two terms, in a row of its own, and 1 in a row that all have."""
    return gr.IndexedSlices(np.ones((3, 2), "float32"), [place, HOT, place])


def places_of(sums):
    """The gradients that sums contain; the row that all touch has their number."""
    rows = [
        (index, value)
        for indices, values in sums
        for index, (value, other) in zip(indices.tolist(), values.tolist(), strict=True)
        if value == other
    ]
    assert len(rows) == sum(len(indices) for indices, _ in sums)
    places = [index for index, _ in rows if index != HOT]
    assert {value for index, value in rows if index != HOT} <= {2.0}
    assert sum(value for index, value in rows if index == HOT) == len(places)
    return sorted(places)


class Run:
    """Appliers and consumers that start together; records added, taken and left gradients."""

    def __init__(self, call_threads, accumulators):
        self.accumulators = accumulators
        self.kept, self.taken = [], []
        self._start = threading.Barrier(NUM_APPLIERS + NUM_CONSUMERS)
        consumers = [call_threads.start(self.take, number) for number in range(NUM_CONSUMERS)]
        appliers = [call_threads.start(self.apply, number) for number in range(NUM_APPLIERS)]
        for call in appliers:
            call.result()
        states = [acc.accumulator_ref for acc in accumulators]
        with hold_locks(states):
            # The rest is not enough for the first take, so takes would wait forever.
            self.left = [acc.state_dict() for acc in accumulators]
            for state in states:
                close(state)  # this may complete a take from the next one alone
        for call in consumers:
            with pytest.raises(CancelledError):
                call.result()

    def apply(self, number):
        mine = range(number, SIZE, NUM_APPLIERS)
        self._start.wait(30)
        for place in mine:
            step = max(acc.global_step for acc in self.accumulators)
            self.kept += self.apply_one(place, step)

    def take(self, number):
        self._start.wait(30)
        while True:
            self.taken.append(self.take_one(number))

    def check(self):
        """Checks the sparse accumulator, which is the first one."""
        left = self.left[0]
        sums = [[(total["indices"], total["values"]) for total in left["partial_sums"] if total]]
        sums += [[(taken.indices, taken.values)] for taken, *_ in self.taken]
        held = [places_of(each) for each in sums]
        assert sorted(place for places in held for place in places) == sorted(self.kept)
        assert len(held[0]) == left["num_accumulated"]
        assert left["global_step"] == len(self.taken) > 0
        assert left["num_dropped"] == self.offered - len(self.kept)
        return held


class MeshRun(Run):
    """Some gradients come from all replicas at once."""

    offered = SIZE + 3 * (SIZE // 5)

    def apply_one(self, place, step):
        (acc,) = self.accumulators
        mesh = acc.accumulator_ref.devices[0].mesh
        if place % 5 == 0:
            places = [place + SIZE * replica for replica in range(len(mesh))]
            value = gr.PerReplica([gradient(each) for each in places], mesh)
            return places if acc.apply_indexed_slices_grad(value, step) else []
        with gr.replica(place % len(mesh)):
            return [place] if acc.apply_indexed_slices_grad(gradient(place), step) else []

    def take_one(self, number):
        (acc,) = self.accumulators
        first, *others = acc.take_indexed_slices_grad(1 + 3 * number).values
        assert all((first.values == other.values).all() for other in others)
        return [first]


def test_sixteen_threads_over_a_mesh(implementation, call_threads):
    with gr.open_mesh([0, 0, 1, 1], backend="sim", kernels=implementation, strict=True) as mesh:
        acc = gr.SparseConditionalAccumulator("float32", reduction_type="SUM", device=mesh)
        MeshRun(call_threads, [acc]).check()


class SeveralRun(Run):
    """With a dense accumulator; half of the threads pass the two in the other order."""

    offered = SIZE

    def ordered(self, number, values):
        return values[::-1] if number % 2 else list(values)

    def apply_one(self, place, step):
        grads = [gradient(place), np.eye(1, SIZE, place, "float32")[0]]
        accumulators = self.ordered(place, self.accumulators)
        return [place] if gr.apply_grads(accumulators, self.ordered(place, grads), step) else []

    def take_one(self, number):
        taken = gr.take_grads(self.ordered(number, self.accumulators), 1 + 3 * number)
        return self.ordered(number, taken)


def test_sixteen_threads_on_a_sparse_and_a_dense_one(device, call_threads):
    run = SeveralRun(call_threads, [
        make("float32", reduction_type="SUM", device=device)
        for make in (gr.SparseConditionalAccumulator, gr.ConditionalAccumulator)
    ])  # fmt: skip
    _, *held = run.check()
    for places, (_, dense) in zip(held, run.taken, strict=True):
        assert np.flatnonzero(dense).tolist() == places
        assert set(dense.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("num", [1200, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_memory_does_not_grow(num):
    """Other rows in every cycle; sometimes sums grow, are taken together, or are dropped."""
    luck = np.random.default_rng(0)
    given = [
        gr.IndexedSlices(np.ones((size, 3), "float32"), luck.integers(0, 99, size))
        for size in luck.integers(0, 40, 64)
    ]
    with gr.open_mesh(1, backend="sim") as mesh:
        device = mesh.devices[0]
        acc = gr.SparseConditionalAccumulator("float32", device=device)
        dense = gr.ConditionalAccumulator("float32", device=device)

        def use(num_cycles):
            for cycle in range(num_cycles):
                step = acc.global_step
                acc.apply_indexed_slices_grad(given[cycle % 64], step)
                if cycle % 10:
                    acc.take_indexed_slices_grad(1)
                    continue
                gr.apply_grads(
                    [acc, dense], [given[luck.integers(64)], np.ones(7)], 2**62, cast=True
                )
                assert not acc.apply_indexed_slices_grad(given[0], step - 1)
                gr.take_grads([acc, dense], 1)

        use(800)  # the first cycles leave memory once
        gc.collect()
        grown, blocks = device._pool.grown, sys.getallocatedblocks()
        use(num)
        gc.collect()
        assert sys.getallocatedblocks() - blocks < num / 4, "less than one for four cycles"
        assert device._pool.grown == grown
        assert len(device.freed) < 10
        assert (acc.global_step, acc.num_dropped) == (800 + num, 80 + num // 10)
