"""The calls of the NCCL library by the CUDA backend."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from fake_cupy import nccl
from fake_cupy.machine import Fault, Machine
from support.exact_data import DTYPES
from support.meshes import refused

import gradreduce as gr
from gradreduce.backends import open_mesh
from gradreduce.backends.cuda import libnccl
from gradreduce.device import Buffer, Mesh
from gradreduce.errors import BackendUnavailableError, CollectiveError

pytestmark = pytest.mark.fake_cupy


@pytest.fixture
def here(gpus) -> Machine:
    return gpus(3)


@pytest.fixture
def mesh(here) -> Iterator[Mesh]:
    with open_mesh([0, 1, 2, 1], backend="cuda") as made:
        yield made


def ones(mesh: Mesh, places=(0, 1, 2)) -> list[Buffer]:
    return [mesh.devices[place].upload(np.full(9, 1.0 + place, np.float32)) for place in places]


def test_communicators_are_made_once_for_each_set_of_gpus(mesh, here):
    for _ in range(2):
        mesh.collective.all_reduce(ones(mesh))
    assert here.counts["init"] == 1
    mesh.collective.all_reduce(ones(mesh, (0, 3)))
    mesh[[3, 0]].collective.all_reduce(ones(mesh, (3, 0)))
    assert here.counts["init"] == 3
    (alone,) = ones(mesh, (2,))
    out = alone.device.empty((9,), "float32")
    mesh.collective.all_reduce([alone])
    mesh.collective.all_gather([out], [alone])
    assert (out.numpy() == 3).all()


def test_a_group_is_sent_when_the_outermost_block_ends_unless_it_raises(mesh, here):
    first, second = ones(mesh), ones(mesh)
    with pytest.raises(KeyError), mesh.collective.group():
        mesh.collective.all_reduce(first)
        raise KeyError
    assert "allReduce" not in here.counts
    with mesh.journal() as journal, mesh.collective.group():
        with mesh.collective.group():
            mesh.collective.all_reduce(first)
        assert "allReduce" not in here.counts
        mesh.collective.broadcast(second, 2)
        assert journal.records == []
    assert (here.counts["allReduce"], here.counts["broadcast"]) == (1, 1)
    assert len(journal.records) == 6
    assert (first[1].numpy() == 6).all()
    assert (second[0].numpy() == 3).all()


def test_memory_that_a_group_gathers_into_lives_until_it_is_sent(mesh):
    with mesh.collective.group():
        for _ in range(4):
            buffers = ones(mesh)
            outs = [buffer.device.empty((27,), "float32") for buffer in buffers]
            mesh.collective.all_gather(outs, buffers)
            del buffers, outs
    mesh.synchronize()


@pytest.fixture
def no_nccl(here, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)


def all_that_reduces(mesh: Mesh, ops: gr.AllReduceCrossDeviceOps) -> list[Callable[[], object]]:
    """Calls that reduce values on the devices of a mesh."""
    arrays = [np.full(40, 1, np.float32) for _ in mesh]
    value = gr.PerReplica(
        [device.upload(array) for device, array in zip(mesh, arrays, strict=True)], mesh
    )
    variable = gr.Variable(arrays[0], device=mesh)
    optimizer = gr.GradientDescentOptimizer(1)
    optimizer.cross_device_ops = ops
    return [
        lambda: ops.reduce(gr.ReduceOp.SUM, value, value),
        lambda: ops.all_reduce([[array] for array in arrays]),
        lambda: gr.ConditionalAccumulator("float32", device=mesh, cross_device_ops=ops),
        lambda: gr.SyncStep([variable], optimizer, ops)([[[array]] for array in arrays]),
        lambda: optimizer.apply_gradients([(value, variable)]),
    ]


@pytest.mark.parametrize("placement", [[0], [0, 0], [1] * 8], ids=str)
def test_one_gpu_needs_no_nccl(here, no_nccl, placement):
    with open_mesh(placement, backend="cuda") as mesh:
        for call in all_that_reduces(mesh, gr.NcclAllReduce(mesh=mesh)):
            call()
        for dtype in DTYPES:
            grads = [[np.ones(5, dtype)] for _ in mesh]
            reduced = gr.all_reduce(grads, gr.ReduceOp.SUM, mesh=mesh)
            assert (reduced[-1][0] == np.full(5, len(mesh)).astype(dtype)).all()
    assert not {"init", "allReduce", "allGather"} & set(here.counts)


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 1, 2, 0]], ids=str)
def test_without_nccl_two_gpus_are_refused_before_a_launch(no_nccl, monkeypatch, placement):
    with open_mesh(placement, backend="cuda") as mesh:
        ops = gr.NcclAllReduce(mesh=mesh)
        value = gr.PerReplica([device.zeros((3,), "float32") for device in mesh], mesh)
        plan = partial(ops.plan, gr.ReduceOp.SUM, [(value, value)])
        for call in (*all_that_reduces(mesh, ops), plan):
            with refused(mesh, BackendUnavailableError, "nvidia-nccl-cu12"):
                call()
        for call in all_that_reduces(mesh, gr.HierarchicalCopyAllReduce(mesh=mesh)):
            call()  # this call needs no library
        monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", True)
        for call in all_that_reduces(mesh, ops):
            call()


def test_gpus_that_nccl_cannot_connect_are_refused_before_a_launch(here):
    """Otherwise the fold would already have overwritten the sums of an accumulator."""
    said = "initialisation of GPUs 0, 1: NCCL_ERROR_SYSTEM_ERROR"
    with open_mesh([0, 1, 1], backend="cuda") as mesh:
        ops = gr.NcclAllReduce(mesh=mesh)
        nccl.library.init_result = 2
        for call in all_that_reduces(mesh, ops):
            with mesh.journal() as journal, pytest.raises(CollectiveError, match=said):
                call()
            assert journal.launches == 0  # only a host array was uploaded
        nccl.library.init_result = 0
        for call in all_that_reduces(mesh, ops):
            call()
        assert here.counts["init"] == 1


def test_a_rank_that_nccl_refuses_ends_the_group_and_the_other_ranks(mesh, monkeypatch):
    make = nccl.NcclCommunicator.__init__

    def refuses_the_second(communicator, num_ranks, identity, rank):
        make(communicator, num_ranks, identity, rank if rank != 1 else num_ranks)

    with monkeypatch.context() as patch:
        patch.setattr(nccl.NcclCommunicator, "__init__", refuses_the_second)
        with pytest.raises(CollectiveError, match="NCCL_ERROR_INVALID_ARGUMENT"):
            mesh.collective.connect(mesh.devices[:3])
    assert [communicator._ended for communicator in nccl.library.made] == ["abort"]
    mesh.collective.connect(mesh.devices[:3])


@pytest.mark.parametrize(
    ("status", "said"),
    [(4, "NCCL_ERROR_INVALID_ARGUMENT"), (8, "result 8")],
    ids=["known to CuPy", "unknown"],
)
def test_a_failing_call_still_ends_the_group(mesh, monkeypatch, status, said):
    def refuses(*_):
        raise nccl.NcclError(status)

    with monkeypatch.context() as patch:
        patch.setattr(nccl.NcclCommunicator, "allReduce", refuses)
        with pytest.raises(CollectiveError, match=f"NCCL all_reduce: {said}"):
            mesh.collective.all_reduce(ones(mesh))
    mesh.synchronize()
    assert nccl.open_group() is None


def test_a_group_that_fails_at_its_end_may_have_launched(mesh, monkeypatch):
    """An earlier mark, made by another thread for example, is no longer the end of a queue."""
    buffers, marks = ones(mesh), []
    mesh.collective.all_reduce(buffers)  # initialises NCCL
    group_end = nccl.groupEnd

    def fails() -> None:
        marks.extend(buffer.device.queue_mark() for buffer in buffers)
        group_end()
        raise nccl.NcclError(1)

    with monkeypatch.context() as patch:
        patch.setattr(mesh.collective._nccl, "groupEnd", fails)
        with pytest.raises(CollectiveError, match="groupEnd: NCCL_ERROR_UNHANDLED_CUDA_ERROR"):
            mesh.collective.all_reduce(buffers)
    for buffer, mark in zip(buffers, marks, strict=True):
        assert buffer.device.queue_mark().event is not mark.event


def test_closing_aborts_all_communicators(here):
    with open_mesh([0, 1], backend="cuda") as mesh:
        mesh.collective.all_reduce(ones(mesh, (0, 1)))
        made = mesh.collective._cliques.communicators()
    assert [comm._ended for comm in made] == ["abort", "abort"]
    mesh.close()
    with pytest.raises(Fault, match="after abort"):
        made[0].check_async_error()
    here.faults.clear()


@pytest.mark.filterwarnings("error")
def test_a_missing_library_names_the_wheel_where_warnings_are_errors(monkeypatch, tmp_path, here):
    """CuPy's module warns when it is imported without libnccl."""
    (tmp_path / "nccl.py").write_text(
        'import warnings\n\navailable = False\nwarnings.warn("nccl library could not be loaded.")\n'
    )
    monkeypatch.delitem(sys.modules, "cupy.cuda.nccl")
    monkeypatch.setattr(sys.modules["cupy.cuda"], "__path__", [str(tmp_path)])
    with (
        open_mesh([0, 1], backend="cuda") as mesh,
        pytest.raises(BackendUnavailableError, match="nvidia-nccl-cu12") as caught,
    ):
        _ = mesh.collective
    assert isinstance(caught.value.__cause__, UserWarning)


LIBNCCL = b"""extern "C" int ncclGetVersion(int* version) { *version = 22105; return 0; }
extern "C" const char* ncclGetLastError(void*) { return "no route to host"; }"""


def test_errors_have_the_text_of_nccl_and_report_two_libraries(here, tmp_path, monkeypatch):
    """Loads two libraries under names that nothing else uses."""
    name = tmp_path.name
    monkeypatch.setattr(libnccl, "_NAME", name)
    files = [tmp_path / folder / name for folder in ("one", "other")]
    for file in files:
        file.parent.mkdir()
    command = ["g++", "-shared", "-fPIC", "-O0", "-xc++", "-", "-o", str(files[0])]
    subprocess.run(command, input=LIBNCCL, check=True)
    ctypes.CDLL(str(files[0]))
    with open_mesh([0, 1], backend="cuda") as mesh:
        nccl.library.init_result = 3
        said = "NCCL_ERROR_INTERNAL_ERROR: internal error; last NCCL error: no route to host"
        with pytest.raises(CollectiveError, match=said + "$"):
            mesh.collective.connect(mesh.devices)
        shutil.copy(*files)
        ctypes.CDLL(str(files[1]))
        with pytest.raises(CollectiveError, match=said + "; this process") as caught:
            mesh.collective.connect(mesh.devices)
    libnccl.warn_of_several.cache_clear()  # the warning is logged once
    with (
        open_mesh([0, 1], backend="cuda") as mesh,
        pytest.warns(RuntimeWarning, match="has loaded 2 libnccl files") as warned,
    ):
        _ = mesh.collective, mesh.collective
    (only,) = warned
    for file in files:
        assert all(f"{file} (2.21.5)" in str(told) for told in (only.message, caught.value))
    monkeypatch.setattr(libnccl, "_MAPS", tmp_path / "missing")  # of a system that has none
    assert libnccl.error_details() == ""
