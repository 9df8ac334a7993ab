"""A PerReplica on other devices than the sums: each replica is a gradient, added in order."""

import numpy as np
import pytest
from accumulator.kinds import bits, counters, expected
from support.exact_data import FLOATS, random_data, same

import gradreduce as gr


def put(devices, arrays):
    """Puts each array into memory of its device."""
    values = [device.upload(array) for device, array in zip(devices, arrays, strict=True)]
    return gr.PerReplica(values, devices=devices)


def num_copied(device, others):
    """The number of these devices whose memory launches of ``device`` cannot access."""
    return sum(not device.mesh_state.peers(device.physical, each.physical) for each in others)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_device_takes_the_replicas_of_a_mesh(mesh, dtype):
    """In their order. The first gradient of a sum alone; copies only without peers."""
    home = mesh.devices[1]
    acc = gr.ConditionalAccumulator(dtype, (None,), device=home)
    arrays = list(random_data((2 * len(mesh), 301), dtype))
    for turn, names in enumerate((["add_n", "accumulate_n"], ["accumulate_n"])):
        part = arrays[turn * len(mesh) : (turn + 1) * len(mesh)]
        grad = put(mesh.devices[:: -1 if turn else 1], part)
        with mesh.journal() as journal:
            assert acc.apply_grad(grad)
        assert [record.name for record in journal.of("launch")] == names
        assert journal.copies == num_copied(home, mesh.devices)
        assert counters(acc) == [((turn + 1) * len(mesh), 0, 0)]
    assert bits(acc.take_grad(2 * len(mesh))) == expected([arrays], dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_cast_has_the_bits_of_one_arrival_after_the_other(device, dtype, given):
    """Also if replicas have several dtypes, which takes more than one launch."""
    left, right = device.mesh.devices
    one, other = (gr.ConditionalAccumulator(dtype, device=right) for _ in range(2))
    for turn, dtypes in enumerate(((given, given), (given, dtype), (dtype, given))):
        arrays = [random_data((301,), each, seed=place) for place, each in enumerate(dtypes)]
        for acc in (one, other):
            acc.set_global_step(2 * turn)
        for step in (2 * turn, 2 * turn + 1):
            one.apply_grad(put([left, right], arrays), step, cast=True)
            for array in arrays:
                other.apply_grad(array, step, cast=True)
        assert same(one.take_grad(4).numpy(), other.take_grad(4, output_type="numpy"))


def test_a_joint_apply_of_several_for_one_sum(device):
    left, right = device.mesh.devices
    accumulators = [
        gr.ConditionalAccumulator("float32", device=each, reduction_type="SUM")
        for each in (left, right, device.mesh)
    ]
    accumulators[1].apply_grad([8.0])
    both = gr.PerReplica([np.full(1, 1, "float32"), np.full(1, 2, "float32")], device.mesh)
    with device.mesh.journal() as journal:
        gr.apply_grads(accumulators, [both, both, both])
    # The first gradients of three new sums, the second of one; the sum that is there.
    assert [(record.name, record.num_rows) for record in journal.records] == [
        ("add_n", 3), ("accumulate_n", 1), ("accumulate_n", 1),
    ]  # fmt: skip
    assert [acc.num_accumulated() for acc in accumulators] == [2, 3, 2]
    alone, more, mirrored = gr.take_grads(accumulators, 2)
    assert (alone.tolist(), more.tolist(), mirrored.primary.tolist()) == ([3], [11], [3])
