"""Any order of calls against a plain model: four accumulators, alone and together.

Two are dense and two sparse, on one device or over a mesh; each has two handles. Waiting takes are
PendingTakes, without threads: when a call returns, the takes that it completes are complete.
"""

import itertools
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from accumulator.kinds import contents
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.exhaustive import examples
from support.take_now import take_now

import gradreduce as gr
from gradreduce.accumulator import multi, take_queue
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError
from gradreduce.reduce.algorithms import ALGORITHMS

PLACEMENT = [0, 0, 1]
UNKNOWN = -1
WHICH = st.integers(0, 3)
OFFSETS = st.sampled_from([0, 0, 0, 1, 2, -1, -2])
HANDLES = st.integers(0, 1)
# Accumulators of one call, in its order; one most often.
SOME = st.one_of(
    WHICH.map(lambda which: [which]), st.lists(WHICH, min_size=2, max_size=4, unique=True)
)
# A gradient is a single array, from one replica, or a PerReplica on some devices, in any order.
FORMS = st.one_of(
    st.none(),
    st.integers(0, len(PLACEMENT) - 1),
    st.permutations(range(len(PLACEMENT))),
    st.just([2, 0]),
)
WAYS = st.sampled_from(["parts", "slices", "buffer"])
_names = itertools.count()


@dataclass(frozen=True)
class Rows:
    """A sparse gradient: row k of it is all ``values[k]``."""

    indices: list[int]
    values: list[int]
    width: int
    first: int | None  # of dense_shape; None: there is none

    @property
    def dense_shape(self):
        return None if self.first is None else (self.first, self.width)

    def array(self, dtype):
        return np.repeat(np.array(self.values, dtype).reshape(-1, 1), self.width, axis=1)

    def value(self, dtype, move=lambda array: array):
        return gr.IndexedSlices(move(self.array(dtype)), self.indices, self.dense_shape)

    def is_one(self):
        """Whether it is a valid IndexedSlices."""
        end = 100 if self.first in (None, UNKNOWN) else self.first
        return all(0 <= index < end for index in self.indices)


@dataclass(frozen=True)
class Dense:
    """A dense gradient; small integers, which are exact in float16, their sum only in float32."""

    values: list[int]

    def value(self, dtype, move=lambda array: array):
        return move(np.array(self.values, dtype))


@st.composite
def rows(draw):
    """Rows in any order, some of them twice or none at all; few are wrong."""
    num_rows = draw(st.sampled_from([0, 1, 2, 3, 5]))
    end = draw(st.sampled_from([3, 3, 6, 8, 9]))
    low = draw(st.sampled_from([0, 0, 0, 0, 0, -1]))
    indices = st.lists(st.integers(low, end - 1), min_size=num_rows, max_size=num_rows)
    values = st.lists(st.integers(-8, 8), min_size=num_rows, max_size=num_rows)
    first = draw(st.sampled_from([None, None, None, UNKNOWN, 8, 8, 5]))
    return Rows(draw(indices), draw(values), draw(st.sampled_from([2] * 9 + [3])), first)


@st.composite
def arrays(draw):
    """A gradient for each replica, of one size, which is rarely another one."""
    size, value = draw(st.sampled_from([1, 1, 1, 1, 2])), draw(st.integers(-300, 300))
    return [Dense([value + place + 10 * turn for place in range(size)]) for turn in range(3)]


GRADIENTS = st.tuples(arrays(), arrays(), *[st.lists(rows(), min_size=3, max_size=3)] * 2)


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
    """A dense accumulator in plain Python."""

    cls = gr.ConditionalAccumulator

    def __init__(self, dtype, reduction_type, shape=None, **options):
        self.dtype, self.reduction_type, self.shape = dtype, reduction_type, shape
        self.options = options
        self.grads = []
        self.step = self.num_dropped = 0
        self.closed = False
        self.queue = []

    def may_enter(self, grads):
        """Checks gradients against the constructor's shape."""
        return True

    def fits(self, grads):
        """Checks gradients against the first one since the last take."""
        return not self.grads or len(grads[0].values) == len(self.grads[0].values)

    def take(self):
        self.step += 1
        taken, self.grads = self.result() if self.grads else None, []
        return taken

    def result(self):
        total = np.sum([grad.values for grad in self.grads], axis=0, dtype="float32")
        divisor = len(self.grads) if self.reduction_type == "MEAN" else 1
        return (total / np.float32(divisor)).astype(self.dtype).tolist()


class SparseModel(Model):
    """A sparse accumulator in plain Python."""

    cls = gr.SparseConditionalAccumulator

    def may_enter(self, grads):
        first, width = self.shape or (None, None)
        return all(each.is_one() for each in grads) and (
            self.shape is None
            or all(
                each.width == width
                and each.first in (None, UNKNOWN, first)
                and all(index < first for index in each.indices)
                for each in grads
            )
        )

    def whole(self, grad):
        """The shape of the sum whose first gradient this is."""
        first = UNKNOWN if grad.first is None else grad.first
        return (first if self.shape is None else self.shape[0], grad.width)

    def fits(self, grads):
        first, width = self.whole((self.grads or grads)[0])
        return all(
            each.width == width
            and (UNKNOWN in (self.whole(each)[0], first) or self.whole(each)[0] == first)
            and (first == UNKNOWN or all(index < first for index in each.indices))
            for each in grads
        )

    def result(self):
        sums, touches = {}, {}
        for grad in self.grads:
            for index, value in zip(grad.indices, grad.values, strict=True):
                sums[index] = sums.get(index, 0) + value
            for index in set(grad.indices):
                touches[index] = touches.get(index, 0) + 1
        indices = sorted(sums)
        total = np.array([sums[index] for index in indices], "float32")
        if self.options.get("sparse_mean") == "per_gradient":
            total /= np.float32(len(self.grads))
        elif self.reduction_type == "MEAN":
            total /= np.array([touches[index] for index in indices], "float32")
        shape = self.whole(self.grads[0])
        table = [[value] * shape[1] for value in total.astype(self.dtype).tolist()]
        return indices, table, shape


class World:
    """The models, and the takes that wait for them."""

    def __init__(self, sparse_mean):
        self.models = [
            Model("float32", "MEAN"),
            Model("float16", "SUM"),
            SparseModel("float32", "MEAN", sparse_mean=sparse_mean),
            SparseModel("float16", "SUM", (8, 2)),
        ]

    def of(self, which):
        return [self.models[place] for place in which]

    def is_closed(self, which):
        return any(model.closed for model in self.of(which))

    def apply(self, which, grads, local_step):
        """Returns whether the gradients were added, or the error."""
        pairs = list(zip(self.of(which), grads, strict=True))
        if not all(model.may_enter(parts) for model, parts in pairs):
            return InvalidArgumentError
        if self.is_closed(which):
            return CancelledError
        if any(local_step < model.step for model, _ in pairs):
            for model, parts in pairs:
                model.num_dropped += len(parts)
            return False
        if not all(model.fits(parts) for model, parts in pairs):
            return InvalidArgumentError
        for model, parts in pairs:
            model.grads += parts
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
                model.queue[0] is head and len(model.grads) >= head.num_required for model in models
            ):
                self.leave(head, [model.take() for model in models])
                return

    def close(self, which):
        model = self.models[which]
        model.closed, model.grads = True, []
        while model.queue:
            self.leave(model.queue[0], "cancelled")


class Accumulators(RuleBasedStateMachine):
    """Small integers: every sum is exact in float32, whatever the order."""

    @initialize(
        algorithm=st.sampled_from(list(ALGORITHMS)),
        peers=st.booleans(),
        sparse_mean=st.sampled_from(["per_row", "per_gradient"]),
        over_mesh=st.tuples(*[st.booleans()] * 4),
    )
    def open_mesh(self, algorithm, peers, sparse_mean, over_mesh):
        self.mesh = gr.open_mesh(PLACEMENT, backend="sim", strict=True, peer_access=peers)
        ops = gr.AllReduceCrossDeviceOps(algorithm)
        self.world = World(sparse_mean)
        self.handles = []
        for spread, model in zip(over_mesh, self.world.models, strict=True):
            make = partial(
                model.cls, model.dtype, model.shape, f"model {next(_names)}",
                reduction_type=model.reduction_type, cross_device_ops=ops,
                device=self.mesh if spread else self.mesh.devices[1], **model.options,
            )  # fmt: skip
            self.handles.append([make(), make()])
        self.waiting = []  # (ticket, in the model)
        self.held = []
        self.saved = [None] * 4

    def teardown(self):
        for part, wanted in getattr(self, "held", []):
            assert contents(part) == wanted
        if hasattr(self, "mesh"):
            self.mesh.close()

    def some(self, which, handle=0):
        return [self.handles[place][handle] for place in which]

    def hold(self, taken, wanted):
        """Checks a result against the model, now and at the end."""
        for result, values in zip(taken, wanted, strict=True):
            if values is None:
                assert result is None
                continue
            for part in result.values if isinstance(result, gr.Mirrored) else [result]:
                assert contents(part) == values
                self.held.append((part, values))

    def checked(self, call, wanted):
        """Makes a call, which returns or raises what the model says."""
        if isinstance(wanted, bool):
            assert call() is wanted
        else:
            with pytest.raises(wanted):
                call()

    @rule(which=SOME, form=FORMS, grads=GRADIENTS, offset=OFFSETS, handle=HANDLES,
          cast=st.booleans())  # fmt: skip
    def apply(self, which, form, grads, offset, handle, cast):
        models = self.world.of(which)
        places = form if isinstance(form, list) else [0]
        given = [grads[place][: len(places)] for place in which]
        local_step = max(model.step for model in models) + offset
        wanted = self.world.apply(which, given, local_step)

        def call():
            values = []
            for model, parts in zip(models, given, strict=True):
                each = [part.value("float64" if cast else model.dtype) for part in parts]
                devices = [self.mesh.devices[place] for place in places]
                several = isinstance(form, list)
                values.append(gr.PerReplica(each, devices=devices) if several else each[0])
            accumulators = self.some(which, handle)
            return gr.apply_grads(accumulators, values, local_step, cast=cast)

        with gr.replica(form) if isinstance(form, int) else nullcontext():
            self.checked(call, wanted)

    @rule(which=WHICH, grads=GRADIENTS, offset=OFFSETS, way=WAYS,
          replica=st.integers(0, len(PLACEMENT) - 1))  # fmt: skip
    def apply_one(self, which, grads, offset, way, replica):
        (acc,), model, grad = self.some([which]), self.world.models[which], grads[which][0]
        step = model.step + offset
        wanted = self.world.apply([which], [[grad]], step)
        move = self.mesh.devices[replica].upload if way == "buffer" else lambda array: array

        def call():
            if not isinstance(grad, Rows):
                return acc.apply_grad(grad.value(model.dtype, move), step)
            if way == "slices":
                return acc.apply_indexed_slices_grad(grad.value(model.dtype), step)
            values = move(grad.array(model.dtype))
            return acc.apply_grad(grad.indices, values, grad.dense_shape, step)

        with gr.replica(replica):
            self.checked(call, wanted)

    @rule(which=SOME, num_required=st.sampled_from([1, 1, 1, 2, 3, 0]), handle=HANDLES)
    def take(self, which, num_required, handle):
        """A take with timeout 0: it completes at once, or leaves the queue."""
        waiting = Waiting(which, num_required)
        if num_required >= 1 and not self.world.is_closed(which):
            self.world.join(waiting)
            if waiting.outcome is None:
                self.world.leave(waiting)
        accumulators = self.some(which, handle)

        def call():
            if len(which) > 1:
                return gr.take_grads(accumulators, num_required, timeout=0)
            (acc,) = accumulators
            take = getattr(acc, "take_indexed_slices_grad", acc.take_grad)
            return [take(num_required, timeout=0)]

        if waiting.outcome is not None:
            self.hold(call(), waiting.outcome)
            return
        closed = CancelledError if self.world.is_closed(which) else DeadlineExceededError
        self.checked(call, InvalidArgumentError if num_required < 1 else closed)

    @rule(which=SOME, num_required=st.integers(1, 4))
    def wait(self, which, num_required):
        states = tuple(acc.accumulator_ref for acc in self.some(which))
        pending_take = multi.PendingTake(states, num_required)
        if self.world.is_closed(which):
            self.checked(lambda: take_queue.join(pending_take), CancelledError)
            return
        self.waiting.append((pending_take, Waiting(which, num_required)))
        self.world.join(self.waiting[-1][1])
        pending_take.in_call.acquire()
        take_queue.join(pending_take)

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0, 9))
    def expire(self, place):
        pending_take, waiting = self.waiting.pop(place % len(self.waiting))
        self.world.leave(waiting)
        self.checked(lambda: take_queue.await_take(pending_take, 0), DeadlineExceededError)

    @rule(which=SOME, num_required=st.integers(1, 3))
    def take_now(self, which, num_required):
        models = self.world.of(which)
        if self.world.is_closed(which):
            self.checked(lambda: take_now(self.some(which), num_required), CancelledError)
            return
        taken = take_now(self.some(which), num_required)
        enough = max(len(model.grads) for model in models) >= num_required
        if any(model.queue for model in models) or not enough:
            assert taken is None
        else:
            self.hold(taken, [model.take() for model in models])

    @rule(which=WHICH, offset=st.integers(-3, 3), handle=HANDLES)
    def set_step(self, which, offset, handle):
        (acc,), model = self.some([which], handle), self.world.models[which]
        if model.closed:
            self.checked(lambda: acc.set_global_step(model.step + offset), CancelledError)
        else:
            acc.set_global_step(model.step + offset)
            model.step += offset

    @rule(which=WHICH)
    def save(self, which):
        (acc,), model = self.some([which]), self.world.models[which]
        if not model.closed:
            kept = model.step, model.num_dropped, list(model.grads)
            self.saved[which] = acc.state_dict(), kept

    @rule(which=WHICH)
    def load(self, which):
        (acc,), model = self.some([which]), self.world.models[which]
        if self.saved[which] is None:
            return
        state, kept = self.saved[which]
        if model.closed:
            self.checked(lambda: acc.load_state_dict(state), CancelledError)
            return
        acc.load_state_dict(state)
        model.step, model.num_dropped, model.grads = *kept[:2], list(kept[2])
        self.world.take_what_waits()

    @precondition(lambda self: not self.world.is_closed(range(4)) and len(self.held) > 3)
    @rule(which=WHICH, handle=HANDLES)
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
                self.checked(lambda take=pending_take: take_queue.await_take(take, 0),
                             CancelledError)  # fmt: skip
            else:
                take_queue.await_take(pending_take, 0)
                self.hold(
                    multi._results_of(pending_take.states, pending_take.taken, None),
                    waiting.outcome,
                )
        self.waiting = still

    @invariant()
    def counts_agree(self):
        for place, handles in enumerate(self.handles):
            model = self.world.models[place]
            for acc in handles:
                assert (acc.global_step, acc.num_dropped) == (model.step, model.num_dropped)
                if not model.closed:
                    assert acc.num_accumulated() == len(model.grads)
                assert len(acc.accumulator_ref.queue) == len(model.queue)


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """Hides the warning about a lower step, which the report would show thousands of times."""
    with caplog.at_level(logging.ERROR, "gradreduce"):
        yield


TestAccumulators = Accumulators.TestCase
TestAccumulators.settings = settings(
    max_examples=examples(160), stateful_step_count=50, deadline=None
)
