"""Any order of calls of sparse accumulators against a plain dictionary of rows.

Two sparse accumulators and a dense one, alone and together, on one device and over a mesh. Small
integers: every sum is exact in float32, whatever the order.
"""

from __future__ import annotations

import copy
import logging
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.exhaustive import examples

import gradreduce as gr
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError

PLACEMENT = [0, 0, 1]
UNKNOWN = -1


class Rows(NamedTuple):
    """A sparse gradient: row k of it is all ``values[k]``."""

    indices: list[int]
    values: list[int]
    width: int
    first: int | None  # of dense_shape; None: there is none

    @property
    def dense_shape(self):
        return None if self.first is None else (self.first, self.width)

    def array(self, dtype):
        made = np.array(self.values, dtype).reshape(-1, 1)
        return np.repeat(made, self.width, axis=1)

    def slices(self, dtype):
        return gr.IndexedSlices(self.array(dtype), self.indices, self.dense_shape)

    def is_one(self):
        """Whether it is a valid IndexedSlices."""
        end = 100 if self.first in (None, UNKNOWN) else self.first
        return all(0 <= index < end for index in self.indices)


@st.composite
def gradients(draw):
    """Rows in any order, some of them twice or none at all; few are wrong."""
    num_rows = draw(st.sampled_from([0, 1, 2, 3, 5]))
    end = draw(st.sampled_from([3, 3, 6, 8, 9]))
    low = draw(st.sampled_from([0, 0, 0, 0, 0, -1]))
    indices = st.lists(st.integers(low, end - 1), min_size=num_rows, max_size=num_rows)
    values = st.lists(st.integers(-8, 8), min_size=num_rows, max_size=num_rows)
    first = draw(st.sampled_from([None, None, None, UNKNOWN, 8, 8, 5]))
    return Rows(draw(indices), draw(values), draw(st.sampled_from([2] * 9 + [3])), first)


class Model:
    """A sparse accumulator in plain Python."""

    def __init__(self, dtype, reduction_type, shape, **options):
        self.dtype, self.reduction_type, self.shape = dtype, reduction_type, shape
        self.options = options
        self.step = self.count = self.num_dropped = 0
        self.closed = False
        self.clear()

    def clear(self):
        self.count, self.sum_shape, self.sums, self.touches = 0, None, {}, {}

    def may_enter(self, given):
        """Checks rows against the constructor's shape."""
        if self.shape is None:
            return True
        first, width = self.shape
        return all(
            each.width == width
            and each.first in (None, UNKNOWN, first)
            and all(index < first for index in each.indices)
            for each in given
        )

    def whole(self, each):
        first = UNKNOWN if each.first is None else each.first
        return (first if self.shape is None else self.shape[0], each.width)

    def fits(self, given):
        """Checks rows against the shape of the first gradient since the last take."""
        first, width = self.sum_shape or self.whole(given[0])
        for each in given:
            own = self.whole(each)
            if own[1] != width or (UNKNOWN not in (own[0], first) and own[0] != first):
                return False
            if first != UNKNOWN and any(index >= first for index in each.indices):
                return False
        return True

    def add(self, given):
        self.sum_shape = self.sum_shape or self.whole(given[0])
        for each in given:
            self.count += 1
            for index, value in zip(each.indices, each.values, strict=True):
                self.sums[index] = self.sums.get(index, 0) + value
            for index in set(each.indices):
                self.touches[index] = self.touches.get(index, 0) + 1

    def take(self):
        """Indices, values and shape, as lists."""
        indices = sorted(self.sums)
        total = np.array([self.sums[index] for index in indices], "float32")
        if self.options.get("sparse_mean") == "per_gradient":
            total /= np.float32(self.count)
        elif self.reduction_type == "MEAN":
            total /= np.array([self.touches[index] for index in indices], "float32")
        width = self.sum_shape[1]
        rows = [[value] * width for value in total.astype(self.dtype).tolist()]
        made = (indices, rows, self.sum_shape)
        self.clear()
        self.step += 1
        return made


class DenseModel(Model):
    """A dense accumulator in plain Python; a gradient is one number."""

    def may_enter(self, given):
        return True

    fits = may_enter

    def add(self, given):
        self.count += 1
        self.sums[0] = self.sums.get(0, 0) + given

    def take(self):
        total = self.sums[0]
        self.clear()
        self.step += 1
        return [float(total)]


WHICH = st.integers(0, 1)
OFFSETS = st.sampled_from([0, 0, 0, 0, 1, -1])
REQUIRED = st.sampled_from([1, 1, 2, 3, 4])
PLACES = st.sampled_from([None, 0, 1, 2])
WAYS = st.sampled_from(["parts", "slices", "buffer"])


class Accumulators(RuleBasedStateMachine):
    """Over a mesh; a subclass has them on one device."""

    over_mesh = True

    @initialize(sparse_mean=st.sampled_from(["per_row", "per_gradient"]))
    def make(self, sparse_mean):
        self.mesh = gr.open_mesh(PLACEMENT, backend="sim", strict=True)
        home = self.mesh if self.over_mesh else self.mesh.devices[1]
        self.models = [
            Model("float32", "MEAN", None, sparse_mean=sparse_mean),
            Model("float16", "SUM", (8, 2)),
            DenseModel("float32", "SUM", None),
        ]
        classes = [gr.SparseConditionalAccumulator] * 2 + [gr.ConditionalAccumulator]
        self.accumulators = [
            make(
                model.dtype,
                model.shape,
                reduction_type=model.reduction_type,
                device=home,
                **model.options,
            )
            for make, model in zip(classes, self.models, strict=True)
        ]
        self.saved = [None] * 3
        self.held = []

    def teardown(self):
        for taken, wanted in self.held:
            self.compare(taken, wanted)
        self.mesh.close()

    def compare(self, taken, wanted):
        for part in taken.values if isinstance(taken, gr.Mirrored) else [taken]:
            if isinstance(part, gr.IndexedSlices):
                rows = part.values  # of the kind of the first gradient
                rows = rows.numpy() if isinstance(rows, gr.Buffer) else rows
                assert (part.indices.tolist(), rows.tolist(), part.dense_shape) == wanted
            else:
                assert part.tolist() == wanted

    def check_apply(self, which, given, local_step, call):
        """``given``: for each accumulator its gradient, a list of Rows or a number."""
        models = [self.models[place] for place in which]
        pairs = list(zip(models, given, strict=True))
        rows = [each for grads in given if isinstance(grads, list) for each in grads]
        if not all(each.is_one() for each in rows) or not all(
            model.may_enter(grads) for model, grads in pairs
        ):
            error = InvalidArgumentError
        elif any(model.closed for model in models):
            error = CancelledError
        elif any(local_step < model.step for model in models):
            assert call() is False
            for model, grads in pairs:
                model.num_dropped += len(grads) if isinstance(grads, list) else 1
            return
        elif not all(model.fits(grads) for model, grads in pairs):
            error = InvalidArgumentError
        else:
            assert call() is True
            for model, grads in pairs:
                model.add(grads)
            return
        with pytest.raises(error):
            call()

    @rule(which=WHICH, grad=gradients(), offset=OFFSETS, place=PLACES, way=WAYS)
    def apply(self, which, grad, offset, place, way):
        acc, model = self.accumulators[which], self.models[which]
        step = model.step + offset

        def call():
            if way == "parts":
                values = grad.array(model.dtype)
                return acc.apply_grad(grad.indices, values, grad.dense_shape, step)
            if way == "slices":
                return acc.apply_indexed_slices_grad(grad.slices(model.dtype), step)
            values = self.mesh.devices[place or 0].upload(grad.array(model.dtype))
            return acc.apply_grad(grad.indices, values, grad.dense_shape, step)

        def there():
            if place is None:
                return call()
            with gr.replica(place):
                return call()

        self.check_apply([which], [[grad]], step, there)

    @rule(which=WHICH, grads=st.lists(gradients(), min_size=3, max_size=3), offset=OFFSETS)
    def apply_replicas(self, which, grads, offset):
        acc, model = self.accumulators[which], self.models[which]
        step = model.step + offset

        def call():
            value = gr.PerReplica([grad.slices(model.dtype) for grad in grads], self.mesh)
            return acc.apply_indexed_slices_grad(value, step)

        self.check_apply([which], [grads], step, call)

    @rule(
        order=st.permutations(range(3)), grads=st.tuples(gradients(), gradients()), offset=OFFSETS
    )
    def apply_all(self, order, grads, offset):
        step = max(model.step for model in self.models) + offset

        def call():
            values = [grad.slices(model.dtype) for grad, model in zip(grads, self.models)]  # noqa: B905
            values.append(np.array([3], "float32"))
            return gr.apply_grads(
                [self.accumulators[place] for place in order],
                [values[place] for place in order],
                step,
            )

        given = [[grads[0]], [grads[1]], 3]
        self.check_apply(order, [given[place] for place in order], step, call)

    def check_take(self, which, num_required, call):
        models = [self.models[place] for place in which]
        if any(model.closed for model in models):
            error = CancelledError
        elif any(model.count < num_required for model in models):
            error = DeadlineExceededError
        else:
            wanted = [model.take() for model in models]
            for taken, rows in zip(call(), wanted, strict=True):
                self.compare(taken, rows)
                self.held.append((taken, rows))
            return
        with pytest.raises(error):
            call()

    @rule(which=WHICH, num_required=REQUIRED)
    def take(self, which, num_required):
        acc = self.accumulators[which]
        self.check_take(
            [which], num_required, lambda: [acc.take_indexed_slices_grad(num_required, timeout=0)]
        )

    @rule(order=st.permutations(range(3)), number=st.integers(1, 3), num_required=REQUIRED)
    def take_together(self, order, number, num_required):
        which = order[:number]
        taken = [self.accumulators[place] for place in which]
        self.check_take(which, num_required, lambda: gr.take_grads(taken, num_required, timeout=0))

    @rule(which=WHICH, offset=st.integers(-2, 2))
    def set_step(self, which, offset):
        acc, model = self.accumulators[which], self.models[which]
        if model.closed:
            with pytest.raises(CancelledError):
                acc.set_global_step(model.step + offset)
            return
        acc.set_global_step(model.step + offset)
        model.step += offset

    @rule(which=st.integers(0, 2))
    def save(self, which):
        acc, model = self.accumulators[which], self.models[which]
        if not model.closed:
            self.saved[which] = acc.state_dict(), copy.deepcopy(vars(model))

    @rule(which=st.integers(0, 2))
    def load(self, which):
        if self.saved[which] is None:
            return
        state, model = self.saved[which]
        if self.models[which].closed:
            with pytest.raises(CancelledError):
                self.accumulators[which].load_state_dict(state)
            return
        self.accumulators[which].load_state_dict(state)
        vars(self.models[which]).update(copy.deepcopy(model))

    @rule(which=WHICH)
    def go_on_from_a_state(self, which):
        acc = self.accumulators[which]
        if not self.models[which].closed:
            acc.load_state_dict(acc.state_dict())

    @precondition(lambda self: len(self.held) > 5)
    @rule(which=WHICH)
    def close(self, which):
        self.accumulators[which].close()
        self.models[which].closed = True

    @invariant()
    def counts_agree(self):
        for acc, model in zip(self.accumulators, self.models, strict=True):
            assert (acc.global_step, acc.num_dropped) == (model.step, model.num_dropped)
            if not model.closed:
                assert acc.num_accumulated() == model.count
            assert not acc.accumulator_ref.queue


class AccumulatorsOnOneDevice(Accumulators):
    over_mesh = False


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """Hides the warning about a lower step, which the report would show thousands of times."""
    with caplog.at_level(logging.ERROR, "gradreduce"):
        yield


TestOverAMesh = Accumulators.TestCase
TestOnOneDevice = AccumulatorsOnOneDevice.TestCase
TestOverAMesh.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
TestOnOneDevice.settings = TestOverAMesh.settings
