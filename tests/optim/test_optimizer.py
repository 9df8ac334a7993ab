"""How gradients reach variables: accepted types and launches."""

import numpy as np
import pytest
from optim.model import ones
from support.exact_data import same

import gradreduce as gr
from gradreduce.reduce.algorithms import ALGORITHMS

# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_per_replica_gradients_are_reduced_by_the_ops_that_are_set(mesh, algorithm):
    class Counted(gr.AllReduceCrossDeviceOps):
        def batch_reduce(self, reduce_op, value_destination_pairs):
            batches.append((reduce_op, len(value_destination_pairs)))
            return super().batch_reduce(reduce_op, value_destination_pairs)

    batches = []
    optimizer = gr.GradientDescentOptimizer(1.0)
    assert type(optimizer.cross_device_ops) is gr.AllReduceCrossDeviceOps
    assert optimizer.cross_device_ops is optimizer.cross_device_ops
    optimizer.cross_device_ops = Counted(algorithm)
    variables = [gr.Variable(np.zeros(4, "float32"), device=mesh) for _ in range(3)]
    grads = [gr.PerReplica([ones(4) * (place + 1)] * len(mesh), mesh) for place in range(3)]
    grads[1] = ones(4)
    optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert [variable.numpy().tolist() for variable in variables] == [[-1] * 4, [-1] * 4, [-3] * 4]
    assert batches == [(gr.ReduceOp.MEAN, 2)], "one batch for all of them"


@pytest.mark.parametrize("kind", [gr.Mirrored, gr.PerReplica])
def test_a_gradient_in_another_order_of_devices(mesh, kind):
    optimizer = gr.GradientDescentOptimizer(1.0)
    variable = gr.Variable(np.zeros(2, "float32"), device=mesh)
    backwards = mesh.devices[::-1]
    grad = kind([np.full(2, device.index, "float32") for device in backwards], devices=backwards)
    optimizer.apply_gradients([(grad, variable)])
    mean = sum(range(len(mesh))) / len(mesh)
    for place, buffer in enumerate(variable.buffers):
        wanted = place if kind is gr.Mirrored else mean
        assert buffer.numpy().tolist() == [-wanted, -wanted], "each device its own copy"


def test_a_variable_on_a_part_of_the_mesh(mesh):
    part = mesh[[1, 0]]
    variable = gr.Variable([0.0], device=part)
    optimizer = gr.GradientDescentOptimizer(1.0)
    spread = gr.PerReplica([ones(1), ones(1) * 3], part)
    outside = mesh.devices[-1].put(ones(1))
    for grad, wanted in [([2.0], [-2.0]), (spread, [-4.0]), (outside, [-5.0])]:
        optimizer.apply_gradients([(grad, variable)])
        assert [buffer.numpy().tolist() for buffer in variable.buffers] == [wanted] * 2


def test_gradients_are_not_written_and_not_kept(mesh, model):
    value = ones(2, 3)
    value.flags.writeable = False
    spread = gr.PerReplica([ones(3, dtype="float16") * place for place in range(len(mesh))], mesh)
    before = [array.copy() for array in spread.values]
    buffer = mesh.devices[0].put(np.float32(1))
    model.optimizer.apply_gradients(model.pairs(value, spread, buffer))
    after = model.state()
    assert (value == 1).all()
    assert all(same(left, right) for left, right in zip(spread.values, before, strict=True))
    assert buffer.numpy() == 1
    for array in spread.values:
        array[...] = 9
    assert model.state() == after


def test_one_gradient_may_serve_two_variables_and_none_is_skipped(mesh):
    first, second, third = (gr.Variable([0.0, 0.0], device=mesh) for _ in range(3))
    empty = gr.Variable(np.empty((0, 2), "float32"), device=mesh)
    scalar = gr.Variable(1.0, device=mesh)
    grad = gr.Mirrored([ones(2)] * len(mesh), mesh)
    nothing = gr.PerReplica([np.empty((0, 2), "float32")] * len(mesh), mesh)
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    optimizer.apply_gradients(
        [(grad, first), (None, second), (grad, third), (nothing, empty), (1, scalar)]
    )
    found = [var.numpy().tolist() for var in (first, second, third, empty, scalar)]
    assert found == [[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0], [], 0]
    assert empty.shape == (0, 2)
    assert optimizer.get_slot(second, "momentum") is None
    assert optimizer.get_slot(third, "momentum") is not None


# -- slots ----------------------------------------------------------------------------------------


def test_slots(mesh):
    weights = gr.Variable(ones(2, 3), "weights", device=mesh)
    bias = gr.Variable(ones(3, dtype="float16"), "bias", device=mesh.devices[1])
    optimizer = gr.MomentumOptimizer(1.0, 0.5)
    assert optimizer.get_name() == "Momentum"
    assert (optimizer.get_slot_names(), optimizer.variables()) == ([], [])
    assert optimizer.get_slot(weights, "momentum") is None
    optimizer.apply_gradients([(ones(2, 3), weights)])
    slot = optimizer.get_slot(weights, "momentum")
    assert isinstance(slot, gr.Variable)
    assert (slot.shape, slot.dtype, slot.devices) == ((2, 3), np.float32, mesh.devices)
    assert slot.trainable is False
    assert slot.numpy().tolist() == [[1.0] * 3] * 2
    assert optimizer.get_slot_names() == ["momentum"]
    optimizer.apply_gradients([(ones(2, 3), weights), (ones(3, dtype="float16"), bias)])
    assert optimizer.get_slot(weights, "momentum") is slot
    assert slot.numpy().tolist() == [[1.5] * 3] * 2
    assert [each.name for each in optimizer.variables()] == ["bias/Momentum", "weights/Momentum"]
    assert optimizer.get_slot(bias, "momentum").devices == bias.devices
    for name in ("Momentum", "", "m"):
        assert optimizer.get_slot(weights, name) is None
    other = gr.MomentumOptimizer(1.0, 0.5, name="other")
    assert other.get_slot(weights, "momentum") is None
    assert other.get_name() == "other"


# -- launches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_one_launch_for_each_gpu_and_dtype(mesh, nesterov):
    variables = [gr.Variable(np.zeros(3 + place), dtype=dtype, device=mesh)
                 for place, dtype in enumerate(["float32", "float16"] * 4)]  # fmt: skip
    grads = [gr.Mirrored([np.ones(var.shape, var.dtype)] * len(mesh), mesh) for var in variables]
    optimizer = gr.MomentumOptimizer(1.0, 0.5, use_nesterov=nesterov)
    optimizer.apply_gradients(zip(grads, variables, strict=True))  # makes the slots
    with mesh.journal() as journal:
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    sharing = mesh.by_physical.values()
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("nesterov" if nesterov else "momentum", 4 * len(places))
        for places in sharing
        for _ in ("float32", "float16")
    ]


def test_a_plain_gradient_is_copied_once_to_each_other_gpu(mesh):
    variable = gr.Variable(np.zeros(8, "float32"), device=mesh)
    optimizer = gr.GradientDescentOptimizer(1.0)
    with mesh.journal() as journal:
        optimizer.apply_gradients([(mesh.devices[0].put(ones(8)), variable)])
    assert journal.launches == len(mesh.by_physical)
    assert journal.copies == len(mesh.by_physical) - 1
    assert journal.bytes == 32 * journal.copies
    assert (journal.syncs, journal.uploads) == (0, 0)


def test_the_gates():
    assert (gr.Optimizer.GATE_NONE, gr.Optimizer.GATE_OP, gr.Optimizer.GATE_GRAPH) == (0, 1, 2)
    assert gr.MomentumOptimizer.GATE_GRAPH == 2
