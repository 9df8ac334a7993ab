"""Dry runs: the same number of devices, the same links, no memory."""

import numpy as np
import pytest

from gradreduce import ops
from gradreduce.backends import open_mesh
from gradreduce.backends.dry_run import DryRunMesh
from gradreduce.errors import DeviceMismatchError


@pytest.fixture
def mesh():
    with open_mesh([0, 1, 1], backend="sim", peer_access=False) as made:
        yield made


@pytest.fixture
def dry_run_mesh(mesh):
    return DryRunMesh.like(mesh[1:2])  # copies the whole mesh, for any part of it


def test_a_dry_run_mesh_is_like_the_other(mesh, dry_run_mesh):
    assert [device.physical for device in dry_run_mesh.mesh] == [0, 1, 1]
    assert [device.name for device in dry_run_mesh.mesh] == [device.name for device in mesh]
    assert dry_run_mesh.mesh.mesh_state is not mesh.mesh_state
    assert not dry_run_mesh.mesh.mesh_state.peers(0, 1)
    assert dry_run_mesh.mesh.backend == mesh.backend


def test_a_dry_run_buffer_is_like_the_other_and_shares_what_that_shares(mesh, dry_run_mesh):
    flat = mesh.devices[2].empty((100,), "float32")
    other = mesh.devices[0].put(np.zeros((3, 2), np.float16)[1:])
    other.block.peer_mapped = False
    originals = flat.view(4, (5, 2)), flat.view(60, (3,)), other
    first, second, third = map(dry_run_mesh.buffer, originals)
    assert (first.shape, first.dtype, first.device.index) == ((5, 2), flat.dtype, 2)
    assert first.block is second.block is not third.block
    assert second.address - first.address == 4 * 56
    assert third.address % 16 == other.address % 16
    assert (first.block.peer_mapped, third.block.peer_mapped) == (True, False)


def test_work_is_recorded_and_not_done(mesh, dry_run_mesh):
    near, far = dry_run_mesh.mesh.devices[:2]
    with dry_run_mesh.mesh.journal() as journal, mesh.journal() as untouched:
        total, term = near.zeros((1 << 40,), "float32"), near.empty((1 << 40,), "float32")
        ops.accumulate_n([total], [[term]])
        far.copy(far.empty((1 << 40,), "float32"), total)
        dry_run_mesh.mesh.collective.all_reduce([total, far.empty((1 << 40,), "float32")])
        dry_run_mesh.mesh.synchronize()
    kinds = [record.kind for record in journal.records]
    assert kinds == ["fill", "launch", "copy", "collective", "collective", *["sync"] * 3]
    assert journal.bytes == 3 * 4 << 40
    assert untouched.records == []
    with pytest.raises(DeviceMismatchError, match="no peer access"):  # as on any device
        ops.add_n([near.empty((3,), "int8")], [[far.empty((3,), "int8")]])


def test_data_is_neither_uploaded_nor_downloaded(dry_run_mesh):
    device = dry_run_mesh.mesh.devices[0]
    buffer = device.empty((3,), "float32")
    for call in (
        lambda: device.put(np.ones(3)),
        lambda: device.adopt(np.ones(3)),
        lambda: device.release(buffer),
        buffer.numpy,
    ):
        with pytest.raises(DeviceMismatchError, match="of a plan"):
            call()
