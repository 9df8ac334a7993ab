"""Tensors are packed into flat buffers and unpacked as the plans of packing.py say."""

from dataclasses import replace

from support.all_reduce_jobs import pack
from support.exact_data import random_data, same

from gradreduce.reduce.pack_buffers import unpack
from gradreduce.reduce.packing import plan_packing


def packed_of(mesh, buffers, num_packs=1):
    """Packs ``buffers[tensor][replica]``; returns the flat buffers and the journal."""
    plans = plan_packing(
        tuple(replicas[0].size for replicas in buffers),
        tuple((replicas[0].dtype,) * 2 for replicas in buffers),
        num_packs, 0, 0,
    )  # fmt: skip
    with mesh.journal() as journal:
        return pack(plans, buffers, [each.device for each in buffers[0]], consume=False), journal


def check_packed(mesh, buffers, num_launches, num_packs=1):
    """Checks the number of launches, and that unpacking gives every array back."""
    arrays = [
        [random_data(buffer.shape, "float32", seed=place + 10 * k)
         for place, buffer in enumerate(replicas)]
        for k, replicas in enumerate(buffers)
    ]  # fmt: skip
    for replicas, contents in zip(buffers, arrays, strict=True):
        for buffer, content in zip(replicas, contents, strict=True):
            buffer.device.upload(content, out=buffer)
    packed, journal = packed_of(mesh, buffers, num_packs)
    assert journal.launches == num_launches
    back = unpack(
        [replace(flat, results=flat.inputs) for flat in packed], [of[0].shape for of in arrays]
    )
    for replicas, expected in zip(back, arrays, strict=True):
        assert [buffer.device for buffer in replicas] == list(mesh.devices)
        assert all(map(same, [buffer.numpy() for buffer in replicas], expected))
    return packed


def flat_columns(mesh, shapes):
    """A flat buffer, and its views by tensor and replica."""
    flat = mesh.flat_buffer(shapes, "float32")
    return flat, [list(replicas) for replicas in zip(*flat.views, strict=True)]


def test_a_flat_buffer_is_recognized_by_its_first_tensors_and_by_part_of_a_mesh(numpy_mesh):
    views = numpy_mesh[-1:].flat_buffer([(3,), (), (0, 4), (5, 7), (16,)], "float32").views
    _, journal = packed_of(numpy_mesh, [[view] for view in views[0][:4]])
    assert journal.records == []


def test_tensors_in_another_layout_are_moved(numpy_mesh):
    _, (first, second, third) = flat_columns(numpy_mesh, [(3,), (3,), (5,)])
    other = [device.empty((3,), "float32") for device in numpy_mesh]
    for buffers in ([second, first, third], [first, other, third], [first, third]):
        check_packed(numpy_mesh, buffers, len(numpy_mesh.by_physical))
    start_off_a_vector = [device.zeros((12,), "float32").view(1, (8,)) for device in numpy_mesh]
    for num_packs, launches in ((1, len(numpy_mesh.by_physical)), (0, 0)):  # alone: no alignment
        check_packed(numpy_mesh, [start_off_a_vector], launches, num_packs)


def test_only_the_replicas_in_another_layout_are_moved(numpy_mesh):
    flat, buffers = flat_columns(numpy_mesh, [(4,), (4,)])
    buffers[0][-1] = numpy_mesh.devices[-1].zeros((4,), "float32")
    (packed,), journal = packed_of(numpy_mesh, buffers)
    assert [(r.device, r.num_rows) for r in journal.records] == [(len(numpy_mesh) - 1, 2)]
    kept = [a.block is b.block for a, b in zip(packed.inputs, flat.buffers, strict=True)]
    assert kept == [True] * (len(numpy_mesh) - 1) + [False]
