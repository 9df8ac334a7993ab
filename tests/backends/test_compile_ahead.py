"""What launches on dry-run devices is compiled on the real ones."""

import threading

import numpy as np
import pytest
from support.compiled_first import watched_compiles
from support.meshes import MeshCase

import gradreduce as gr
from gradreduce import ops
from gradreduce.backends.compile_ahead import compile_ahead
from gradreduce.device import as_dtype
from gradreduce.errors import BackendUnavailableError

FLOAT, HALF = as_dtype("float32"), as_dtype("float16")


def packs(devices, dtypes=(FLOAT, HALF)):
    """Work that packs on each device, for each dtype."""

    def work(dry_run):
        for device in dry_run.devices_like(devices):
            for dtype in dtypes:
                ops.pack([device.empty((3,), FLOAT)], [device.empty((3,), dtype)])

    return work


def test_what_launches_is_compiled_once_on_each_physical_device():
    with MeshCase((0, 0, 1)).open() as mesh, watched_compiles(mesh) as watch:
        with mesh.journal() as journal:
            for _ in range(2):
                compile_ahead(mesh.devices, "packs", packs(mesh.devices))
        assert sorted(watch.compiled) == [
            (physical, "pack", ("float32", dtype))
            for physical in (0, 1)
            for dtype in ("float16", "float32")
        ]
        assert journal.records == []
        assert mesh.flight_record() == []


def test_nothing_runs_for_devices_that_compile_nothing():
    with MeshCase((0,)).open() as mesh:
        compile_ahead(mesh.devices, "packs", lambda dry_run: pytest.fail("it ran"))
        assert not mesh.mesh_state.compiled_keys
    with pytest.raises(BackendUnavailableError, match="closed"):
        compile_ahead(mesh.devices, "packs", packs(mesh.devices))


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), KeyboardInterrupt()])
def test_a_kernel_that_does_not_compile_is_tried_again(monkeypatch, error):
    with MeshCase((0, 1)).open() as mesh, watched_compiles(mesh) as watch:
        with monkeypatch.context() as patch:

            def fails(kernel, template):
                raise error

            patch.setattr(mesh.devices[1], "_compile_kernel", fails)
            with pytest.raises(type(error)):
                compile_ahead(mesh.devices, "packs", packs(mesh.devices))
        compile_ahead(mesh.devices, "packs", packs(mesh.devices))
        assert len(watch.compiled) == 4


def test_kernels_are_compiled_in_several_threads(monkeypatch):
    """Each waits for the other."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=60)
    with MeshCase((0,)).open() as mesh, watched_compiles(mesh):
        monkeypatch.setattr(mesh.devices[0], "_compile_kernel", lambda *_: both.wait())
        compile_ahead(mesh.devices, "packs", packs(mesh.devices))


def test_memory_that_peers_cannot_access_is_packed_by_a_compiled_kernel():
    """The plan was made for memory that they can access."""
    with MeshCase((0, 1)).open() as mesh, watched_compiles(mesh) as watch:
        reducer = gr.HierarchicalCopyAllReduce(0, mesh=mesh)
        rows = [[device.upload(np.ones(9, np.int8))] for device in mesh.devices]
        reducer.all_reduce(rows)
        rows[1][0].block.peer_mapped = False
        watch.start()
        reducer.all_reduce(rows)
        assert watch.compiled == []
