"""Opening meshes: every argument, every environment variable, every error; parts; flat buffers."""

import importlib.util
import logging
import math
import re
import reprlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
from support.exact_data import same

import gradreduce as gr
import gradreduce.device
from gradreduce import backends as module
from gradreduce.backends import default_mesh, open_mesh
from gradreduce.backends.device_names import as_device
from gradreduce.device import ALIGNMENT, Mesh, as_dtype, by_physical, flat_layout
from gradreduce.device.failure.pending_calls import names_of
from gradreduce.errors import BackendUnavailableError, brief

VARIABLES = (
    "GRADREDUCE_BACKEND",
    "GRADREDUCE_SIM_DEVICES",
    "GRADREDUCE_SIM_STRICT",
    "GRADREDUCE_SIM_THREADS",
)
LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No environment variable set, no CuPy, no warning logged, no default mesh."""
    for name in (*VARIABLES, *LAUNCHERS, *module._LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    monkeypatch.setattr(module, "_warn_once", cache(module._warn_once.__wrapped__))
    monkeypatch.setattr(module, "_default", [])


def opened(*arguments, **options):
    return open_mesh(*arguments, backend="sim", **options)


def placement(mesh) -> list[int]:
    return [device.physical for device in mesh.devices]


@pytest.mark.parametrize(
    ("devices", "placed"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        (np.int64(2), [0, 1]),
        ([np.int8(0), 1], [0, 1]),
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ((2, 0, 7), [2, 0, 7]),
        (range(2, 4), [2, 3]),
        (iter([1, 1]), [1, 1]),
        (None, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_devices_are_a_number_or_a_placement(devices, placed):
    with opened(devices) as mesh:
        assert placement(mesh) == placed
        assert [device.index for device in mesh.devices] == list(range(len(placed)))
        assert all(device.mesh is mesh for device in mesh.devices)
        assert (len(mesh), mesh.num_replicas) == (len(placed), len(placed))
        assert (mesh.process_index, mesh.num_processes, mesh.backend) == (0, 1, "sim")
        assert list(mesh) == list(mesh.devices)
        assert repr(mesh) == f"<Mesh sim {placed}>"


@pytest.mark.parametrize(
    "devices",
    [0, -1, True, False, [], (), "2", "", 2.0, 2.5, [0, -1], [0, True], [0, 1.0], [None], ["0"],
     [[0]], object, np.True_, [0, np.True_], 1025, 10**9, -(10**9), range(10**9), [0] * 10**4],
    ids=reprlib.repr,
)  # fmt: skip
def test_other_devices_are_refused(devices):
    text = f"devices={reprlib.repr(devices)} must be a number from 1 to 1024, or a list of at most "
    text += "1024 physical device numbers from 0 up"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        opened(devices)


def test_other_names_are_refused_with_what_to_pass():
    not_one = "{} is not one of ('cuda', 'sim')"
    implementations = "{} is not one of ('numpy', 'compiled', 'exact', 'sanitized')"
    refused = {
        "devices": [
            ("cuda", "{} is a name: pass backend='cuda'"),
            ("gpu:1", "{} is a name: pass [1], backend='cuda'"),
            ("CPU", "{} is a name: pass backend='sim'"),
            ("cuda:all", "{} is a name: pass backend='cuda'"),
            ("sim:0", "{} is a name: pass [0], backend='sim'"),
        ],
        "backend": [
            ("gpu", f"{not_one}: 'cuda' computes on GPUs"),
            ("cpu", f"{not_one}: 'sim' computes on the CPU"),
            *[(value, not_one) for value in ("", "SIM", 3, np.zeros(1))],
        ],
        "kernels": [(value, implementations) for value in ("cupy", "", "fast")],
        "processes": [
            (value, "{} must be None or one of ('auto', 'none', 'torchrun', 'mpi', 'slurm')")
            for value in ("all", "", 1, True, "None")
        ],
    }
    for argument, cases in refused.items():
        options = {} if argument in ("devices", "backend") else {"backend": "sim"}
        for value, said in cases:
            with pytest.raises(ValueError) as caught:
                open_mesh(**{**options, argument: value})
            text = f"{argument}={said.format(brief(value))}"
            assert str(caught.value) == text


def test_peer_access_is_between_all_physical_devices_or_none():
    for peer_access in (True, False):
        with opened([0, 1], peer_access=peer_access) as mesh:
            assert mesh.mesh_state.peers(0, 1) is mesh.mesh_state.peers(1, 0) is peer_access
            assert mesh.mesh_state.peers(1, 1)


def test_strict_memory_is_an_argument_or_a_variable(monkeypatch):
    def is_strict(**options) -> bool:
        with opened(1, **options) as mesh:
            return bool(np.isnan(mesh.devices[0].empty((3,), "float32").numpy()).all())

    assert is_strict(strict=True)
    monkeypatch.setenv("GRADREDUCE_SIM_STRICT", "1")
    assert is_strict()
    monkeypatch.setenv("GRADREDUCE_SIM_STRICT", "0")
    with opened(1) as mesh:
        assert mesh.devices[0].options.strict is False
    monkeypatch.setenv("GRADREDUCE_SIM_STRICT", "1")
    with opened(1, strict=False) as mesh:  # the argument wins
        assert mesh.devices[0].options.strict is False


def test_numbers_of_devices_and_threads_come_from_variables(monkeypatch):
    monkeypatch.setenv("GRADREDUCE_SIM_DEVICES", "7")
    monkeypatch.setenv("GRADREDUCE_SIM_THREADS", "5")
    with opened() as mesh:
        assert len(mesh) == 7
        assert {device.options.workers.num_threads for device in mesh} == {5}
    with opened(2) as mesh:  # the argument wins
        assert len(mesh) == 2
    for name in VARIABLES[1:]:
        monkeypatch.setenv(name, "")  # as if it were not set
    with opened() as mesh:
        assert len(mesh) == 4
        assert mesh.devices[0].options.workers.num_threads >= 1


@pytest.mark.parametrize(
    ("name", "allowed", "wrong"),
    [
        (
            "GRADREDUCE_SIM_DEVICES",
            "from 1 to 1024",
            ["0", "-1", "four", "2.0", " 2", "\u00b2", "\u0663", "1000000000"],
        ),
        ("GRADREDUCE_SIM_THREADS", "from 1 to 1024", ["0", "-1", "two", "1e3", "9" * 5000]),
        ("GRADREDUCE_SIM_STRICT", "from 0 to 1", ["yes", "true", "-1", "2", "\u0661"]),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, allowed, wrong):
    for value in wrong:
        monkeypatch.setenv(name, value)
        text = f"{name}={reprlib.repr(value)} must be a number {allowed}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            opened()
    monkeypatch.setenv("GRADREDUCE_BACKEND", "gpu")
    text = "GRADREDUCE_BACKEND='gpu' is not one of ('cuda', 'sim'): 'cuda' computes on GPUs"
    for call in (open_mesh, default_mesh):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()
    monkeypatch.delenv(name)
    opened(1).close()  # with an explicit backend the variable is not read


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_of_several_processes_says_that_it_works_alone(monkeypatch, name):
    for value in ("1", "0", "-2", "", "many", "2.0", "\u00b2"):  # no launcher sets these
        monkeypatch.setenv(name, value)
        opened(2).close()
    monkeypatch.setenv(name, "2")
    text = f"^{name}=2: .* inside each process.*processes='none'"
    for options in ({}, {"backend": "sim"}, {"backend": "cuda"}, {"processes": None}):
        with pytest.raises(RuntimeError, match=text) as caught:
            open_mesh(2, **options)
        assert not isinstance(caught.value, BackendUnavailableError)  # no fallback
    for use in (default_mesh, lambda: gr.PerReplica([1.0, 2.0])):
        with pytest.raises(RuntimeError, match=text):
            use()
    with opened(2, processes="none") as mesh:
        assert (len(mesh), mesh.num_processes) == (2, 1)
    with opened(processes="none") as mesh, opened(1, processes="none"):
        assert len(mesh) == 4
        assert default_mesh() is mesh
        rows = gr.IndexedSlices(np.ones((2, 3)), np.array([0, 0]), (1, 3))
        assert rows.to_dense().tolist() == [[2.0] * 3]
    with pytest.raises(RuntimeError, match=text):  # it is closed
        default_mesh()


INSTALL = re.escape(
    "pip install 'gradreduce[cuda13]' (in a clone: pip install '.[cuda13]'); "
    "for CUDA 12, without PyTorch, write cuda12"
)


@pytest.fixture(params=["not installed", "broken", "no GPU"])
def why(request, monkeypatch) -> str:
    """The reason why there is no CUDA backend, in the error."""
    if request.param == "not installed":
        return f"CuPy is not installed; {INSTALL}"
    if request.param == "broken":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.delitem(sys.modules, "gradreduce.backends.cuda.device", raising=False)
        monkeypatch.delattr(gradreduce.device, "cuda", raising=False)
        return rf"CuPy cannot be imported \(.*\); {INSTALL}"

    def sees_none() -> None:
        raise BackendUnavailableError("CuPy sees no GPU")

    monkeypatch.setattr(module, "_cuda_backend", sees_none)
    return "CuPy sees no GPU"


def test_cuda_by_name_is_cuda_or_an_error(monkeypatch, caplog, why):
    text = f"^backend='cuda' cannot run here: {why}"
    for devices in (None, 2, [0, 0]):
        with pytest.raises(BackendUnavailableError, match=text):
            open_mesh(devices, backend="cuda")
    monkeypatch.setenv("GRADREDUCE_BACKEND", "cuda")
    for call in (open_mesh, default_mesh):
        with pytest.raises(BackendUnavailableError, match=text):
            call()
    assert caplog.records == []
    monkeypatch.delenv("GRADREDUCE_BACKEND")
    with open_mesh(2) as mesh:  # without a backend the warning says why
        assert mesh.backend == "sim"
    (record,) = caplog.records
    assert re.search(why, record.getMessage())


def test_without_a_backend_it_warns_once_and_simulates(caplog, monkeypatch):
    open_mesh(1, backend="sim").close()
    monkeypatch.setenv("GRADREDUCE_BACKEND", "sim")
    open_mesh(1).close()
    monkeypatch.delenv("GRADREDUCE_BACKEND")
    monkeypatch.setenv("LOCAL_RANK", "1")  # the process of local rank 0 warns
    open_mesh(2).close()
    assert caplog.records == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(3):
        with open_mesh(2) as mesh:
            assert mesh.backend == "sim"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradreduce", logging.WARNING)
    assert logging.getLogger("gradreduce").handlers == []  # then Python writes it to stderr
    text = record.getMessage()
    for part in (
        "simulated devices (NumPy)",
        "CuPy is",
        "pip install 'gradreduce[cuda13]' (in a clone: pip install '.[cuda13]')",
        "GRADREDUCE_BACKEND=sim silences this",
        "GRADREDUCE_BACKEND=cuda makes it an error",
    ):
        assert part in text


def test_the_default_mesh_is_made_once(monkeypatch, caplog):
    monkeypatch.setenv("GRADREDUCE_SIM_DEVICES", "3")
    with default_mesh() as mesh:
        assert len(mesh) == 3
        monkeypatch.setenv("GRADREDUCE_SIM_DEVICES", "5")
        assert default_mesh() is mesh
    assert len(caplog.records) == 1
    with default_mesh() as again:  # the first was closed
        assert again is not mesh
        assert len(again) == 5
    assert len(caplog.records) == 1


def test_threads_that_ask_together_get_one_default_mesh():
    start = threading.Barrier(8)

    def ask(_: int) -> Mesh:
        start.wait(timeout=30)
        return default_mesh()

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    assert len(set(map(id, got))) == 1
    got[0].close()


def test_a_part_has_the_same_devices():
    with opened([0, 0, 1, 2]) as mesh:
        zero, one, two, three = mesh.devices
        for part, devices in [
            (mesh[0:2], (zero, one)),
            (mesh[[0, 3]], (zero, three)),
            (mesh[(3, 1)], (three, one)),
            (mesh[::-2], (three, one)),
            (mesh[[-1]], (three,)),
            (mesh[:], (zero, one, two, three)),
            (mesh[1:][[0, 2]], (one, three)),
        ]:
            assert part.devices == devices
            assert (len(part), part.num_replicas) == (len(devices), len(devices))
            assert part.mesh_state is mesh.mesh_state
            assert part.collective is mesh.collective
            assert all(device.mesh is mesh for device in part)


def test_indexing_returns_the_devices_of_iteration():
    with opened([0, 0, 1]) as mesh:
        for place, device in enumerate(mesh):
            for index in (place, np.int64(place), place - len(mesh), np.array(place)):
                assert mesh[index] is device
        assert mesh[1:][0] is mesh.devices[1]
        assert mesh[np.array([2, 0])].devices == (mesh.devices[2], mesh.devices[0])


def test_invalid_parts_are_refused():
    with opened(4) as mesh:
        for part in ([], [1, 1], [0, -4], slice(2, 2), slice(4, None)):
            with pytest.raises(ValueError, match="at least one device, and none twice"):
                mesh[part]
        for place in (4, -5, np.int64(4), [0, 4]):
            text = f"mesh[{place!r}]: the mesh has 4 devices"
            with pytest.raises(IndexError, match=f"^{re.escape(text)}$"):
                mesh[place]
        mask = [True, False, False, False]
        for part in (True, np.True_, mask, np.array(mask), 1.0, [1.0], "sim:0", None):
            with pytest.raises(TypeError, match="must be an index, a slice or a list of indices"):
                mesh[part]


def test_indices_are_grouped_by_physical_device():
    with opened([2, 0, 2, 1, 0]) as mesh:
        assert list(mesh.by_physical.items()) == [(2, (0, 2)), (0, (1, 4)), (1, (3,))]
        part = mesh[[4, 3, 1]]
        assert list(part.by_physical.items()) == [(0, (0, 2)), (1, (1,))]
        assert by_physical(part.devices) == part.by_physical


SHAPES = [(3, 5), (), (0, 4), (7,), (16,), (1, 1, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "int8"])
def test_a_flat_buffer_is_laid_out_as_a_pack_with_zeros_between_its_tensors(dtype):
    dtype = as_dtype(dtype)
    with opened([0, 0, 1], strict=True) as mesh:
        flat = mesh[1:].flat_buffer(SHAPES, str(dtype))
        sizes = [math.prod(shape) for shape in SHAPES]
        layout = flat_layout(sizes, dtype.itemsize)
        assert [buffer.device for buffer in flat.buffers] == list(mesh.devices[1:])
        for buffer, views in zip(flat.buffers, flat.views, strict=True):
            assert (buffer.shape, buffer.dtype) == ((layout.size,), dtype)
            assert [view.shape for view in views] == SHAPES
            wanted = np.zeros(layout.size, dtype)
            for view, offset in zip(views, layout.offsets, strict=True):
                assert (view.device, view.dtype, view.block) == (buffer.device, dtype, buffer.block)
                assert view.address == buffer.address + offset * dtype.itemsize
                assert view.address % ALIGNMENT == 0
                view.device.upload(np.ones(view.shape, dtype), out=view)
                wanted[offset : offset + view.size] = 1
            assert same(buffer.numpy(), wanted)


def test_shapes_of_a_flat_buffer_are_any_iterables_of_integers_from_zero_up():
    with opened(2) as mesh:
        flat = mesh.flat_buffer([], "float32")
        assert [buffer.size for buffer in flat.buffers] == [0, 0]
        assert flat.views == ((), ())
        flat = mesh.flat_buffer((iter(shape) for shape in [(2, 3), ()]), "float32")
        assert [view.shape for view in flat.views[0]] == [(2, 3), ()]
        with pytest.raises(TypeError, match="cannot be added"):
            mesh.flat_buffer([(3,)], "bool")
        for wrong in (3, (2.0,), "ab"):
            with pytest.raises(TypeError, match=r"shapes\[1\]=.* must be a list of integers"):
                mesh.flat_buffer([(1,), wrong], "float32")
        with pytest.raises(ValueError, match=r"shapes\[1\]=\(-2, -3\) has a negative extent"):
            mesh.flat_buffer([(1,), (-2, -3)], "float32")


def test_a_context_that_raises_closes_its_mesh():
    with pytest.raises(ZeroDivisionError), opened(1) as failed:
        raise ZeroDivisionError
    with pytest.raises(BackendUnavailableError, match="was closed"):
        failed.synchronize()


def test_no_message_lists_all_of_many_devices():
    """At most five: the message of a large mesh would have thousands of characters."""
    with opened(100) as mesh:
        buffers = [device.zeros((1,), "float32") for device in mesh]
        told = [repr(mesh)]
        for call in (
            lambda: mesh.collective.all_reduce([*buffers, buffers[0]]),
            lambda: mesh.collective.all_reduce(buffers, sources=buffers[::-1]),
            lambda: mesh.collective.all_gather(buffers, buffers[::-1]),
            lambda: mesh[[*range(100), 0]],
            lambda: mesh[[*range(101)]],
            lambda: as_device("gpu:100", "device=", mesh),
        ):
            with pytest.raises((ValueError, IndexError, gr.errors.CollectiveError)) as caught:
                call()
            told.append(str(caught.value))
        for text in told:
            assert len(text) < 900, text
        assert names_of(mesh) == "sim:0, sim:1, sim:2, sim:3, sim:4 and 95 more"
