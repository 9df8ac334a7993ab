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


def test_over_a_mesh_each_replica_is_added_on_its_own_device(mesh):
    """In any order, on some of the devices; nothing is copied."""
    acc = gr.ConditionalAccumulator("float32", device=mesh, reduction_type="SUM")
    values = [np.full(5, 1 << place, "float32") for place in range(len(mesh))]
    everyone, some = mesh.devices[::-1], mesh.devices[:0:-2]
    with mesh.journal() as journal:
        for devices in (everyone, some):
            arrays = [values[mesh.devices.index(device)] for device in devices]
            acc.apply_grad(gr.PerReplica(arrays, devices=devices))
    assert journal.copies == 0
    assert counters(acc) == [(len(mesh) + len(some), 0, 0)]
    totals = [total.numpy() for total in acc.accumulator_ref.totals]
    for device, total, value in zip(mesh.devices, totals, values, strict=True):
        assert (total == value * (2 if device in some else 1)).all()


def test_replicas_from_outside_a_part_are_added_on_its_first_device(mesh):
    part = mesh[1:]
    acc = gr.ConditionalAccumulator("float32", device=part, reduction_type="SUM")
    arrays = [np.full(5, 1 << place, "float32") for place in range(len(mesh))]
    with mesh.journal() as journal:
        acc.apply_grad(put(mesh.devices, arrays))
    assert journal.copies == num_copied(mesh.devices[1], mesh.devices[:1])
    totals = [total.numpy() for total in acc.accumulator_ref.totals]
    assert same(totals[0], arrays[0] + arrays[1])
    assert all(map(same, totals[1:], arrays[2:]))
    taken = acc.take_grad(len(mesh))
    assert all(same(buffer.numpy(), sum(arrays)) for buffer in taken.buffers)


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
