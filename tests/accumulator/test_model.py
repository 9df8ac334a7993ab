"""Any order of calls against a plain model: three accumulators, alone and together.

One is on one device and two are over a mesh; each has two handles. Waiting takes are PendingTakes,
without threads: when a call returns, the takes that it completes are complete.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.exhaustive import examples

import gradreduce as gr
from gradreduce.accumulator import multi, take_now, take_queue
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError
from gradreduce.reduce.algorithms import ALGORITHMS

NUM_DEVICES = 3
OFFSETS = st.sampled_from([0, 0, 0, 1, 2, -1, -2])
SMALL = st.integers(-300, 300)
SIZES = st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 2, 1)])
HANDLES = st.integers(0, 1)
# Accumulators of one call, in its order; one most often.
SOME = st.one_of(
    st.integers(0, 2).map(lambda which: [which]),
    st.lists(st.integers(0, 2), min_size=2, max_size=3, unique=True),
)
# A gradient is a single array, from one replica, or a PerReplica on some devices, in any order.
FORMS = st.one_of(
    st.none(),
    st.integers(0, NUM_DEVICES - 1),
    st.permutations(range(NUM_DEVICES)),
    st.just([2, 0]),
)
_names = itertools.count()


@dataclass(eq=False)
class Waiting:
    """A take in the queues of the model.

    Attributes:
        which: the accumulators.
        num_required: the number of gradients that each must have.
        outcome: the results, ``"cancelled"``, or None while it waits.
    """

    which: list[int]
    num_required: int
    outcome: object = None


class Model:
    """An accumulator in plain Python."""

    def __init__(self, dtype, reduction_type):
        self.dtype, self.reduction_type = dtype, reduction_type
        self.values = []  # lists of integers of one length
        self.step = self.num_dropped = 0
        self.closed = False
        self.queue = []

    def fits(self, grads):
        return not self.values or len(grads[0]) == len(self.values[0])

    def take(self):
        self.step += 1
        if not self.values:
            return None
        total = np.sum(self.values, axis=0, dtype="float32")
        divisor = len(self.values) if self.reduction_type == "MEAN" else 1
        self.values = []
        return (total / np.float32(divisor)).astype(self.dtype).tolist()


class World:
    """Three models and the takes that wait for them."""

    def __init__(self):
        self.models = [Model("float32", "MEAN"), Model("float16", "SUM"), Model("float32", "SUM")]

    def of(self, which):
        return [self.models[place] for place in which]

    def is_closed(self, which):
        return any(model.closed for model in self.of(which))

    def apply(self, which, grads, local_step):
        """Returns whether the gradients were added, or the error."""
        models = self.of(which)
        if self.is_closed(which):
            return CancelledError
        if any(local_step < model.step for model in models):
            for model, parts in zip(models, grads, strict=True):
                model.num_dropped += len(parts)
            return False
        if not all(model.fits(parts) for model, parts in zip(models, grads, strict=True)):
            return InvalidArgumentError
        for model, parts in zip(models, grads, strict=True):
            model.values += parts
        self.take_what_waits()
        return True

    def join(self, waiting):
        for model in self.of(waiting.which):
            model.queue.append(waiting)
        self.take_what_waits()

    def leave(self, waiting, outcome=None):
        waiting.outcome = outcome
        for model in self.of(waiting.which):
            model.queue.remove(waiting)
        self.take_what_waits()

    def take_what_waits(self):
        """Completes takes that are first in all queues and have enough, until there is none."""
        for head in [model.queue[0] for model in self.models if model.queue]:
            models = self.of(head.which)
            if not self.is_closed(head.which) and all(
                model.queue[0] is head and len(model.values) >= head.num_required
                for model in models
            ):
                self.leave(head, [model.take() for model in models])
                return

    def close(self, which):
        model = self.models[which]
        model.closed, model.values = True, []
        while model.queue:
            self.leave(model.queue[0], "cancelled")


class Accumulators(RuleBasedStateMachine):
    """Small integers: every gradient is exact in float16, their sum only in float32."""

    @initialize(algorithm=st.sampled_from(list(ALGORITHMS)), peers=st.booleans())
    def open_mesh(self, algorithm, peers):
        self.mesh = gr.open_mesh([0, 0, 1], backend="sim", strict=True, peer_access=peers)
        ops = gr.AllReduceCrossDeviceOps(algorithm)
        self.world = World()
        self.handles = []
        for place, model in enumerate(self.world.models):
            home = self.mesh if place else self.mesh.devices[1]
            name = f"model {next(_names)}"
            self.handles.append([
                gr.ConditionalAccumulator(
                    model.dtype, shared_name=name, reduction_type=model.reduction_type,
                    device=home, cross_device_ops=ops,
                )
                for _ in range(2)
            ])  # fmt: skip
        self.waiting = []  # (ticket, in the model)
        self.held = []

    def teardown(self):
        if hasattr(self, "mesh"):
            self.mesh.close()
        for array, wanted in getattr(self, "held", []):
            assert array.tolist() == wanted

    def some(self, which, handle=0):
        return [self.handles[place][handle] for place in which]

    def hold(self, taken, wanted):
        """Checks a result against the model, now and at the end."""
        for result, values in zip(taken, wanted, strict=True):
            if values is None:
                assert result is None
                continue
            for array in result.values if isinstance(result, gr.Mirrored) else [result]:
                assert array.tolist() == values
                self.held.append((array, values))

    def gradient(self, form, value, size, cast):
        """An array or a PerReplica, and what it adds."""
        devices = form if isinstance(form, list) else [0]
        values = [[value + place + 10 * turn for place in range(size)]
                  for turn in range(len(devices))]  # fmt: skip
        arrays = [np.array(each, "float64") if cast else np.array(each) * 1.0 for each in values]
        if not isinstance(form, list):
            return arrays[0] if cast else values[0], values
        return gr.PerReplica(arrays, devices=[self.mesh.devices[each] for each in devices]), values

    @rule(which=st.integers(0, 2), form=FORMS, value=SMALL, handle=HANDLES)
    def apply_one(self, which, form, value, handle):
        self.apply([which], form, value, (1, 1, 1), 0, handle)

    @rule(which=SOME, form=FORMS, value=SMALL, sizes=SIZES, offset=OFFSETS, handle=HANDLES)
    def apply(self, which, form, value, sizes, offset, handle):
        made = [
            self.gradient(form, value + place, sizes[place], cast=True)
            for place in range(len(which))
        ]
        local_step = max(model.step for model in self.world.of(which)) + offset
        wanted = self.world.apply(which, [parts for _, parts in made], local_step)
        with gr.replica(form) if isinstance(form, int) else nullcontext():
            accumulators, grads = self.some(which, handle), [grad for grad, _ in made]

            def call():
                if len(which) == 1:
                    return accumulators[0].apply_grad(grads[0], local_step, cast=True)
                return gr.apply_grads(accumulators, grads, local_step, cast=True)

            if isinstance(wanted, bool):
                assert call() is wanted
            else:
                with pytest.raises(wanted):
                    call()

    @rule(which=SOME, num_required=st.sampled_from([1, 1, 1, 2, 0]), handle=HANDLES)
    def take(self, which, num_required, handle):
        """A take with timeout 0: it completes at once, or leaves the queue."""
        waiting = Waiting(which, num_required)
        if num_required >= 1 and not self.world.is_closed(which):
            self.world.join(waiting)
            if waiting.outcome is None:
                self.world.leave(waiting)
        accumulators = self.some(which, handle)

        def call():
            if len(which) == 1:
                return [accumulators[0].take_grad(num_required, timeout=0)]
            return gr.take_grads(accumulators, num_required, timeout=0)

        if waiting.outcome is not None:
            self.hold(call(), waiting.outcome)
            return
        closed = CancelledError if self.world.is_closed(which) else DeadlineExceededError
        with pytest.raises(InvalidArgumentError if num_required < 1 else closed):
            call()

    @rule(which=SOME, num_required=st.integers(1, 4))
    def wait(self, which, num_required):
        states = tuple(acc.accumulator_ref for acc in self.some(which))
        pending_take, waiting = (
            multi.PendingTake(states, num_required),
            Waiting(which, num_required),
        )
        if self.world.is_closed(which):
            with pytest.raises(CancelledError):
                take_queue.join(pending_take)
            return
        self.waiting.append((pending_take, waiting))
        self.world.join(waiting)
        pending_take.in_call.acquire()
        take_queue.join(pending_take)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 9))
    def expire(self, place):
        pending_take, waiting = self.waiting.pop(place % len(self.waiting))
        self.world.leave(waiting)
        with pytest.raises(DeadlineExceededError):
            take_queue.await_take(pending_take, 0)

    @rule(which=SOME, num_required=st.integers(1, 3))
    def take_now(self, which, num_required):
        models = self.world.of(which)
        if self.world.is_closed(which):
            with pytest.raises(CancelledError):
                take_now(self.some(which), num_required)
            return
        taken = take_now(self.some(which), num_required)
        enough = max(len(model.values) for model in models) >= num_required
        if any(model.queue for model in models) or not enough:
            assert taken is None
        else:
            self.hold(taken, [model.take() for model in models])

    @rule(which=st.integers(0, 2), offset=st.integers(-3, 3), handle=HANDLES)
    def set_step(self, which, offset, handle):
        (acc,), model = self.some([which], handle), self.world.models[which]
        if model.closed:
            with pytest.raises(CancelledError):
                acc.set_global_step(model.step + offset)
        else:
            acc.set_global_step(model.step + offset)
            model.step += offset

    @precondition(lambda self: not self.world.is_closed([0, 1, 2]) and len(self.held) > 3)
    @rule(which=st.integers(0, 2), handle=HANDLES)
    def close(self, which, handle):
        self.handles[which][handle].close()
        self.world.close(which)

    @invariant()
    def waiters_agree(self):
        """Checks that the same takes as in the model are complete or cancelled."""
        still = []
        for pending_take, waiting in self.waiting:
            assert pending_take.done.is_set() == (waiting.outcome is not None)
            if waiting.outcome is None:
                still.append((pending_take, waiting))
            elif waiting.outcome == "cancelled":
                with pytest.raises(CancelledError):
                    take_queue.await_take(pending_take, 0)
            else:
                take_queue.await_take(pending_take, 0)
                self.hold(
                    multi._results_of(pending_take.states, pending_take.taken), waiting.outcome
                )
        self.waiting = still

    @invariant()
    def counts_agree(self):
        for place, handles in enumerate(self.handles):
            model = self.world.models[place]
            for acc in handles:
                assert (acc.global_step, acc.num_dropped) == (model.step, model.num_dropped)
                if not model.closed:
                    assert acc.num_accumulated() == len(model.values)
                assert len(acc.accumulator_ref.queue) == len(model.queue)


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """Hides the warning about a lower step, which the report would show thousands of times."""
    with caplog.at_level(logging.ERROR, "gradreduce"):
        yield


TestAccumulators = Accumulators.TestCase
TestAccumulators.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None
)
