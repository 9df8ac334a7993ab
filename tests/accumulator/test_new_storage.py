"""A new storage class works with everything that accumulators do."""

from contextlib import ExitStack

import numpy as np
import pytest

import gradreduce as gr
from gradreduce.accumulator.base import create_state
from gradreduce.accumulator.state import Addend, Storage
from gradreduce.accumulator.validate import to_sum_device


class MaximumStorage(Storage):
    """Keeps the maximum of each element, in an array on the host."""

    format = "maximum 1"
    is_sparse = False

    def rehearse(self, state, dtype):
        """Has no kernels, and reads gradients on the host."""

    def validate(self, state, grad, cast):
        return np.asarray(grad, state.dtype)

    def to_addend(self, state, grad):
        index, array = to_sum_device(state, grad)
        return Addend(index, array, array.shape)

    def check_sum_shape(self, gradient, sum_shape):
        if gradient.shape != sum_shape:
            raise gr.errors.InvalidArgumentError(f"{gradient.shape} is not {sum_shape}")

    def allocate(self, additions):
        for each in additions:
            each.in_place = each.total is not None
            each.total = each.total if each.in_place else np.full(each.gradients[0].shape, -np.inf)
            each.steps = [part.values.numpy() for part in each.gradients]

    def command(self, steps):
        def launch():
            for each, array in steps:
                np.maximum(each.total, array, out=each.total)

        return launch

    def take(self, states, guard):
        assert isinstance(guard, ExitStack)
        taken = {}
        for state in states:
            most = np.max([total for total in state.totals if total is not None], axis=0)
            found = most.astype(state.dtype)
            taken[state] = tuple(device.upload(found) for device in state.devices)
        return taken

    def fits(self, shape, required):
        return True

    def save(self, total):
        return total.copy()

    def load(self, name, saved, dtype, shape, count):
        return lambda device: np.array(saved)


class MaximumAccumulator(gr.ConditionalAccumulatorBase):
    storage = MaximumStorage()

    def __init__(self, device, shared_name=None):
        made = create_state("float32", None, shared_name, "SUM", device, None, self.storage)
        super().__init__(made, "maximum")

    def apply_grad(self, grad, local_step=0):
        return gr.apply_grads([self], [grad], local_step)


def test_it_takes_part_in_joint_calls_takes_and_checkpoints(mesh, call_threads):
    most, dense = MaximumAccumulator(mesh), gr.ConditionalAccumulator("float32", device=mesh)
    rows = gr.SparseConditionalAccumulator("float32", device=mesh)
    everyone = [most, dense, rows]
    take = call_threads.waiting(gr.take_grads, everyone, 3)
    for replica, values in enumerate(([1.0, 5.0], [2.0, -7.0])):
        with gr.replica(replica):
            slices = gr.IndexedSlices(np.float32([values]), [replica])
            assert gr.apply_grads(everyone, [values, values, slices])
    loaded = MaximumAccumulator(mesh)
    loaded.load_state_dict(most.state_dict())
    for each in (most, loaded):
        with pytest.raises(gr.errors.InvalidArgumentError, match="is not"):
            each.apply_grad([3.0])
        each.apply_grad([0.0, 6.0])
        assert each.num_accumulated() == 3
    assert not take.is_done
    gr.apply_grads([dense, rows], [[0.0, 5.0], slices])
    maximum, mean, sums = take.result()
    assert [part.tolist() for part in maximum.values] == [[2, 6]] * len(mesh)
    assert (mean.primary.tolist(), sums.primary.indices.tolist()) == ([1, 1], [0, 1])
    assert (most.apply_grad([9.0, 9.0]), most.global_step, most.num_dropped) == (False, 1, 1)
    (again,) = gr.take_grads([loaded], 1)
    assert again.primary.tolist() == [2, 6]


def test_other_accumulators_refuse_its_state_and_its_name(device):
    most = MaximumAccumulator(device, shared_name="of maxima")
    with pytest.raises(ValueError, match="has format maximum 1, not gradreduce dense"):
        gr.ConditionalAccumulator("float32", shared_name="of maxima", device=device)
    with pytest.raises(ValueError, match="format"):
        most.load_state_dict(gr.ConditionalAccumulator("float32", device=device).state_dict())
