"""Tensors are packed into flat buffers and unpacked as the plans of packing.py say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import meshes
from support.all_reduce_jobs import pack
from support.exact_data import random_data, same
from support.meshes import adopted, owned

from gradreduce.reduce.hierarchical_copy import HierarchicalCopy
from gradreduce.reduce.pack_buffers import unpack
from gradreduce.reduce.packing import plan_packing

mesh = meshes.mesh

# Shapes of a batch: a scalar, an empty one, and sizes just below and above a vector.
SHAPES = [(3,), (), (0, 4), (5, 7), (16,), (1,), (2, 2, 2)]


def gradients_of(mesh, shapes, dtypes, place):
    """``gradients[tensor][replica]``, and the arrays in them."""
    arrays = [
        [random_data(shape, dtype, seed=97 * tensor + replica) for replica in range(len(mesh))]
        for tensor, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    buffers = [
        [place(device, array) for device, array in zip(mesh, replicas, strict=True)]
        for replicas in arrays
    ]
    return buffers, arrays


def plans_of(buffers, num_packs, *small, out_dtypes=None):
    dtypes = [replicas[0].dtype for replicas in buffers]
    return plan_packing(
        tuple(replicas[0].size for replicas in buffers),
        tuple(zip(dtypes, out_dtypes or dtypes, strict=True)),
        num_packs,
        *(small or (0, 0)),
    )


def check_round_trip(mesh, packed, arrays):
    """Unpacking what was packed gives every array back."""
    back = unpack(
        [replace(flat, results=flat.inputs) for flat in packed], [of[0].shape for of in arrays]
    )
    for replicas, expected in zip(back, arrays, strict=True):
        assert [buffer.device for buffer in replicas] == list(mesh.devices)
        for buffer, array in zip(replicas, expected, strict=True):
            assert same(buffer.numpy(), array)


def test_gaps_between_packed_tensors_are_zeros(mesh):
    buffers, _ = gradients_of(mesh, [(3,), (6,), (1,)], ["float32"] * 3, owned)
    (packed,) = pack(plans_of(buffers, 1), buffers, mesh.devices, consume=False)
    for flat in packed.inputs:
        content = flat.numpy()
        assert content.size == 16
        assert not content[[3, 10, 11, 13, 14, 15]].any()


def test_a_flat_buffer_is_recognized_by_its_first_tensors_and_by_part_of_a_mesh(mesh):
    views = mesh[-1:].flat_buffer(SHAPES, "float32").views
    buffers = [[view] for view in views[0][:4]]
    with mesh.journal() as journal:
        pack(plans_of(buffers, 1), buffers, mesh.devices[-1:], consume=False)
    assert journal.records == []


@pytest.mark.parametrize("change", ["swapped", "one replaced", "the middle one left out"])
def test_tensors_in_another_layout_are_moved(mesh, change):
    shapes = [(3,), (3,), (5,)]
    flat = mesh.flat_buffer(shapes, "float32")
    buffers = [list(replicas) for replicas in zip(*flat.views, strict=True)]
    if change == "swapped":
        buffers[0], buffers[1] = buffers[1], buffers[0]
    elif change == "one replaced":
        buffers[1] = [device.empty((3,), "float32") for device in mesh]
    else:
        buffers = [buffers[0], buffers[2]]
    arrays = [
        [
            random_data(buffer.shape, "float32", seed=place + 10 * k)
            for place, buffer in enumerate(r)
        ]
        for k, r in enumerate(buffers)
    ]
    for replicas, contents in zip(buffers, arrays, strict=True):
        for buffer, content in zip(replicas, contents, strict=True):
            buffer.device.upload(content, out=buffer)
    with mesh.journal() as journal:
        packed = pack(plans_of(buffers, 1), buffers, mesh.devices, consume=False)
    assert journal.launches == len(mesh.by_physical)
    check_round_trip(mesh, packed, arrays)


def test_tensors_that_start_off_a_vector_boundary_are_moved(mesh):
    arrays = [[random_data((8,), "float32", seed=replica) for replica in range(len(mesh))]]
    blocks = [device.zeros((12,), "float32") for device in mesh]
    buffers = [[block.view(1, (8,)) for block in blocks]]
    for buffer, array in zip(buffers[0], arrays[0], strict=True):
        buffer.device.upload(array, out=buffer)
    for num_packs, launches in ((1, len(mesh.by_physical)), (0, 0)):  # alone: no alignment
        with mesh.journal() as journal:
            packed = pack(plans_of(buffers, num_packs), buffers, mesh.devices, consume=False)
        assert journal.launches == launches
        check_round_trip(mesh, packed, arrays)


def test_only_the_replicas_in_another_layout_are_moved(mesh):
    flat = mesh.flat_buffer([(4,), (4,)], "float32")
    buffers = [list(replicas) for replicas in zip(*flat.views, strict=True)]
    buffers[0][-1] = mesh.devices[-1].zeros((4,), "float32")
    with mesh.journal() as journal:
        (packed,) = pack(plans_of(buffers, 1), buffers, mesh.devices, consume=False)
    assert [(r.device, r.num_rows) for r in journal.records] == [(len(mesh) - 1, 2)]
    kept = [a.block is b.block for a, b in zip(packed.inputs, flat.buffers, strict=True)]
    assert kept == [True] * (len(mesh) - 1) + [False]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_peer_reads_no_memory_that_is_not_mapped(mesh, mapped):
    buffers, arrays = gradients_of(mesh, [(4,), (8,)], ["float32"] * 2, adopted)
    for buffer in [each for replicas in buffers for each in replicas]:
        buffer.block.peer_mapped = mapped
    reads_peers = HierarchicalCopy(mesh.devices).reads_peers
    assert reads_peers == (len(mesh.by_physical) > 1 and bool(mesh.mesh_state.peer_access))
    packs_all = reads_peers and not mapped
    for num_packs in (0, 1):
        with mesh.journal() as journal:
            packed = pack(plans_of(buffers, num_packs), buffers, mesh.devices, consume=False)
        if packs_all:
            assert all(buffer.block.owned for flat in packed for buffer in flat.inputs)
        assert journal.launches == (len(mesh.by_physical) if packs_all or num_packs else 0)
        check_round_trip(mesh, packed, arrays)
