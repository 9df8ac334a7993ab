"""Any order of calls against a plain model: two accumulators on one device, alone and together."""

from __future__ import annotations

import logging

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import gradreduce as gr
from gradreduce.errors import CancelledError, DeadlineExceededError, InvalidArgumentError

WHICH = st.integers(0, 1)
SIZES = st.integers(1, 3)
OFFSETS = st.integers(-2, 2)
SMALL = st.integers(-1000, 1000)


class Model:
    """What an accumulator is, in plain Python."""

    def __init__(self, dtype, reduction_type):
        self.dtype = dtype
        self.reduction_type = reduction_type
        self.values = []  # lists of integers of one length
        self.step = 0
        self.num_dropped = 0
        self.closed = False

    def is_stale(self, local_step):
        return local_step < self.step

    def fits(self, value):
        return not self.values or len(value) == len(self.values[0])

    def take(self):
        total = np.sum(self.values, axis=0, dtype="float32")
        divisor = len(self.values) if self.reduction_type == "MEAN" else 1
        self.values = []
        self.step += 1
        return (total / np.float32(divisor)).astype(self.dtype).tolist()


class Accumulators(RuleBasedStateMachine):
    """Small integers: every gradient is exact in float16, their sum only in float32."""

    def __init__(self):
        super().__init__()
        self.mesh = gr.open_mesh(1, backend="sim", strict=True)
        self.models = [Model("float32", "MEAN"), Model("float16", "SUM")]
        self.accumulators = [
            gr.ConditionalAccumulator(
                model.dtype, reduction_type=model.reduction_type, device=self.mesh.devices[0]
            )
            for model in self.models
        ]
        self.held = []

    def teardown(self):
        for array, wanted in self.held:
            assert array.tolist() == wanted
        self.mesh.close()

    def open(self):
        return not any(model.closed for model in self.models)

    def gradients(self, value, size):
        return [value + place for place in range(size)]

    @rule(which=WHICH, value=SMALL, size=SIZES, offset=OFFSETS, cast=st.booleans())
    def apply(self, which, value, size, offset, cast):
        acc, model = self.accumulators[which], self.models[which]
        grad, local_step = self.gradients(value, size), model.step + offset
        array = np.array(grad, "float64") if cast else grad
        if model.closed:
            with pytest.raises(CancelledError):
                acc.apply_grad(array, local_step, cast=cast)
        elif model.is_stale(local_step):
            assert acc.apply_grad(array, local_step, cast=cast) is False
            model.num_dropped += 1
        elif not model.fits(grad):
            with pytest.raises(InvalidArgumentError):
                acc.apply_grad(array, local_step, cast=cast)
        else:
            assert acc.apply_grad(array, local_step, cast=cast) is True
            model.values.append(grad)

    @rule(values=st.tuples(SMALL, SMALL), sizes=st.tuples(SIZES, SIZES), offset=OFFSETS,
          backwards=st.booleans())  # fmt: skip
    def apply_both(self, values, sizes, offset, backwards):
        grads = [self.gradients(*pair) for pair in zip(values, sizes, strict=True)]
        order = slice(None, None, -1 if backwards else 1)
        local_step = max(model.step for model in self.models) + offset

        def call():
            return gr.apply_grads(self.accumulators[order], grads[order], local_step)

        if not self.open():
            with pytest.raises(CancelledError):
                call()
        elif any(model.is_stale(local_step) for model in self.models):
            assert call() is False
            for model in self.models:
                model.num_dropped += 1
        elif not all(model.fits(grad) for model, grad in zip(self.models, grads, strict=True)):
            with pytest.raises(InvalidArgumentError):
                call()
        else:
            assert call() is True
            for model, grad in zip(self.models, grads, strict=True):
                model.values.append(grad)

    @rule(which=WHICH, num_required=st.integers(0, 4))
    def take(self, which, num_required):
        acc, model = self.accumulators[which], self.models[which]
        if num_required < 1:
            error = InvalidArgumentError
        elif model.closed:
            error = CancelledError
        elif len(model.values) < num_required:
            error = DeadlineExceededError
        else:
            wanted = model.take()
            taken = acc.take_grad(num_required, timeout=0)
            assert taken.tolist() == wanted
            self.held.append((taken, wanted))
            return
        with pytest.raises(error):
            acc.take_grad(num_required, timeout=0)

    @rule(num_required=st.integers(1, 3), backwards=st.booleans())
    def take_both(self, num_required, backwards):
        order = slice(None, None, -1 if backwards else 1)
        enough = min(len(model.values) for model in self.models) >= num_required
        if not (self.open() and enough):
            with pytest.raises(DeadlineExceededError if self.open() else CancelledError):
                gr.take_grads(self.accumulators[order], num_required, timeout=0)
            return
        wanted = [model.take() for model in self.models]
        taken = gr.take_grads(self.accumulators[order], num_required, timeout=0)[order]
        assert [array.tolist() for array in taken] == wanted
        self.held += zip(taken, wanted, strict=True)

    @rule(which=WHICH, offset=st.integers(-3, 3))
    def set_step(self, which, offset):
        acc, model = self.accumulators[which], self.models[which]
        if model.closed:
            with pytest.raises(CancelledError):
                acc.set_global_step(model.step + offset)
        else:
            acc.set_global_step(model.step + offset)
            model.step += offset

    @precondition(lambda self: self.open() and len(self.held) > 3)
    @rule(which=WHICH)
    def close(self, which):
        self.accumulators[which].close()
        self.models[which].closed = True

    @invariant()
    def counts_agree(self):
        for acc, model in zip(self.accumulators, self.models, strict=True):
            assert (acc.global_step, acc.num_dropped) == (model.step, model.num_dropped)
            if not model.closed:
                assert acc.num_accumulated() == len(model.values)
            assert not acc.accumulator_ref.queue


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """Lowering the step is logged; the test's report need not show it thousands of times."""
    with caplog.at_level(logging.ERROR, "gradreduce"):
        yield


TestAccumulators = Accumulators.TestCase
TestAccumulators.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
