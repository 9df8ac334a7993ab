"""Variables: one equal copy on each device, of the caller's values and never of their memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from exact import COMPLEX, DTYPES, FLOATS, INTEGERS, exact_data, same

import gradreduce as gr
from gradreduce.device import as_dtype

FACES = ["numpy", pytest.param("compiled", marks=pytest.mark.host)]


@pytest.fixture(scope="module", params=FACES)
def mesh(request) -> Iterator[gr.Mesh]:
    options = {"kernels": request.param, "strict": True, "peer_access": False}
    with gr.open_mesh([0, 1, 1, 2], backend="sim", **options) as made:
        yield made


@pytest.fixture(params=["device", "mesh"])
def place(request, mesh):
    """What ``device=`` may be."""
    return mesh if request.param == "mesh" else mesh.devices[2]


def copies(variable):
    return [buffer.numpy() for buffer in variable.buffers]


def check(variable, wanted):
    assert all(same(copy, np.asarray(wanted)) for copy in copies(variable))


# -- making one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_arrays_dtype_is_kept(place, dtype):
    values = exact_data((2, 3), dtype)
    variable = gr.Variable(values, trainable=False, device=place)
    assert (variable.dtype, variable.shape) == (dtype, (2, 3))
    check(variable, values)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1, "int64"), ([1, 2], "int64"), (1.0, "float32"), ([1, 2.0], "float32"),
     ([], "float32"), (1j, "complex128"), (np.float64(1), "float64"), (np.int8(1), "int8")],
)  # fmt: skip
def test_the_dtype_of_numbers_and_lists(place, value, dtype):
    assert gr.Variable(value, trainable=False, device=place).dtype == dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [2, 2.5, [1, 2.5], np.arange(3), np.ones(2, "float64")])
def test_a_dtype_that_is_asked_for(place, dtype, value):
    variable = gr.Variable(value, dtype=dtype, device=place)
    check(variable, np.asarray(value).astype(dtype))
    assert variable.trainable


@pytest.mark.parametrize("dtype", [*INTEGERS, *COMPLEX], ids=str)
def test_only_floats_are_trainable(place, dtype):
    for options in ({}, {"dtype": dtype}):
        with pytest.raises(ValueError, match=f"Invalid type {dtype} of a trainable variable"):
            gr.Variable(np.ones(2, dtype), device=place, **options)
    assert gr.Variable(np.ones(2, dtype), trainable=False, device=place).trainable is False


def test_counters_are_not_trainable_by_default_values(place):
    with pytest.raises(ValueError, match="trainable=False"):
        gr.Variable(0, device=place)


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [
        (True, {}, TypeError),
        (np.array([True]), {}, TypeError),
        ("text", {}, TypeError),
        (None, {}, TypeError),
        (object(), {}, TypeError),
        ([1.0, "a"], {}, (TypeError, ValueError)),
        ([[1.0], [1.0, 2.0]], {}, ValueError),
        (1.0, {"dtype": "bool"}, TypeError),
        (1.0, {"dtype": "nonsense"}, TypeError),
        (1.5, {"dtype": "int32"}, ValueError),
        (1j, {"dtype": "float32", "trainable": True}, ValueError),
    ],
)
def test_what_makes_no_variable(place, value, options, error):
    with pytest.raises(error):
        gr.Variable(value, **{"trainable": False, **options}, device=place)


@pytest.mark.parametrize("device", [0, "sim:0", [], ()])
def test_a_device_is_a_device_or_a_mesh(device):
    with pytest.raises(TypeError, match="neither a Device nor a Mesh"):
        gr.Variable(1.0, device=device)


def test_the_initial_value_is_copied(place):
    values = np.array([1.0, 2.0], "float32")
    variable = gr.Variable(values, device=place)
    values[...] = 9
    check(variable, np.array([1.0, 2.0], "float32"))
    variable.assign([3.0, 4.0])
    assert values.tolist() == [9.0, 9.0]


def test_a_buffer_is_copied_and_names_the_default_device(mesh):
    buffer = mesh.devices[3].put(np.array([1.0, 2.0]))
    variable = gr.Variable(buffer)
    assert variable.devices == (mesh.devices[3],)
    mesh.devices[3].release(buffer)[...] = 9
    assert variable.numpy().tolist() == [1.0, 2.0]
    spread = gr.Variable(buffer, device=mesh, dtype="float16")
    check(spread, np.array([9.0, 9.0], "float16"))
    with gr.open_mesh(1, backend="sim") as other, pytest.raises(gr.errors.DeviceMismatchError):
        gr.Variable(buffer, device=other)


def test_without_a_device_it_lies_on_the_first_of_the_default_mesh(mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.variables.default_mesh", lambda: mesh)
    assert gr.Variable(1.0).devices == mesh.devices[:1]
    assert gr.Variable([[1.0]]).devices == mesh.devices[:1]
    assert gr.Variable(np.ones(2)).devices == mesh.devices[:1]


def test_with_a_device_no_other_mesh_is_opened():
    """``GRADREDUCE_BACKEND=cuda`` would make opening the default one an error here."""
    code = (
        "import gradreduce as gr\n"
        "mesh = gr.open_mesh(2, backend='sim')\n"
        "var = gr.Variable([1.0, 2.0], device=mesh)\n"
        "var.assign([3, 4]).assign_add([1.0, 1.0])\n"
        "print(var.numpy().tolist(), gr.Variable(1, trainable=False, device=mesh).dtype)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(gr.__file__).parent.parent),
           "GRADREDUCE_BACKEND": "cuda", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[4.0, 5.0] int64\n", "")


def test_names(mesh):
    first, second = (gr.Variable(1.0, device=mesh) for _ in range(2))
    assert first.name != second.name
    assert first.name.startswith("Variable")
    assert second.name.startswith("Variable_")
    named = gr.Variable(1.0, "weights", device=mesh)
    assert named.name == "weights"
    assert repr(named) == "<Variable 'weights' float32[] on sim:0, sim:1, sim:2, sim:3>"


def test_filled_like(place):
    variable = gr.Variable(np.ones((2, 3), "float16"), device=place)
    slot = gr.Variable.filled_like(variable, "slot")
    assert (slot.name, slot.trainable) == ("slot", False)
    assert (slot.shape, slot.dtype, slot.devices) == ((2, 3), np.float16, variable.devices)
    check(slot, np.zeros((2, 3), "float16"))
    slot.assign_add(np.ones((2, 3), "float16"))
    check(variable, np.ones((2, 3), "float16"))
    check(slot, np.ones((2, 3), "float16"))


# -- reading --------------------------------------------------------------------------------------


def test_one_copy_on_each_device(mesh):
    variable = gr.Variable([1.0, 2.0], device=mesh)
    assert variable.devices == mesh.devices
    assert [buffer.device for buffer in variable.buffers] == list(mesh.devices)
    assert len({buffer.block for buffer in variable.buffers}) == len(mesh)
    part = gr.Variable([1.0], device=mesh[[3, 1]])
    assert part.devices == (mesh.devices[3], mesh.devices[1])


def test_a_replica_reads_its_own_copy(mesh):
    variable = gr.Variable([0.0], device=mesh)
    for place, buffer in enumerate(variable.buffers):
        buffer.device.release(buffer)[...] = place
    assert variable.numpy().tolist() == [0.0]
    for place in range(len(mesh)):
        with gr.replica(place):
            assert variable.numpy().tolist() == [float(place)]
            assert np.asarray(variable).tolist() == [float(place)]
            with gr.replica(0):
                assert variable.numpy().tolist() == [0.0]
    with gr.replica(len(mesh)), pytest.raises(ValueError, match=r"replica 4 .* 4 copies"):
        variable.numpy()


def test_a_variable_on_one_device_is_the_same_for_every_replica(mesh):
    variable = gr.Variable([5.0], device=mesh.devices[1])
    with gr.replica(3):
        assert variable.numpy().tolist() == [5.0]


def test_numpy_is_a_copy(place):
    variable = gr.Variable([1.0, 2.0], device=place)
    read = variable.numpy()
    read[...] = 9
    check(variable, np.array([1.0, 2.0], "float32"))
    read = variable.numpy()
    variable.assign([3.0, 4.0])
    assert read.tolist() == [1.0, 2.0]


def test_numpy_functions_take_it(place):
    variable = gr.Variable([[1.0, 2.0], [3.0, 4.0]], device=place)
    assert (np.asarray(variable) == [[1, 2], [3, 4]]).all()
    assert np.asarray(variable).dtype == np.float32
    assert np.asarray(variable, "float64").dtype == np.float64
    assert np.array(variable, copy=True).flags.writeable
    assert (np.ones((1, 2), "float32") @ variable).tolist() == [[4.0, 6.0]]
    assert np.sum(variable) == 10
    scalar = gr.Variable(3, trainable=False, device=place)
    assert (int(scalar), float(scalar)) == (3, 3.0)


# -- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_assign_and_assign_add(place, mesh, dtype):
    start, value, delta = exact_data((3, 2, 5), dtype)
    variable = gr.Variable(start, trainable=False, device=place)
    assert variable.assign(value) is variable
    check(variable, value)
    with np.errstate(all="ignore"):
        wanted = value + delta
    assert variable.assign_add(delta) is variable
    check(variable, wanted)
    for device in mesh.devices:  # from anywhere in the mesh
        variable.assign(device.put(value)).assign_add(device.put(delta))
        check(variable, wanted)
    assert same(value, exact_data((3, 2, 5), dtype)[1])


@pytest.mark.parametrize("value", [5, 5.5, [[1, 2.5]], ((1, 2),)])
def test_numbers_and_lists_become_the_variables_dtype(place, value):
    for dtype in FLOATS:
        variable = gr.Variable(np.zeros(np.shape(value)), dtype=dtype, device=place)
        check(variable.assign(value), np.asarray(value).astype(dtype))
        check(variable.assign_add(value), (2 * np.asarray(value)).astype(dtype))


def test_a_global_step_counts(place):
    step = gr.Variable(0, "global_step", trainable=False, device=place)
    for _ in range(3):
        step.assign_add(1)
    step.assign_add(np.int64(10)).assign_add(-1)
    assert int(step) == 12
    check(step, np.int64(12))


def test_halves_are_added_in_float32(place):
    variable = gr.Variable(np.array([2048.0]), dtype="float16", device=place)
    variable.assign_add([3])
    check(variable, np.array([2052], "float16"))


@pytest.mark.parametrize("method", ["assign", "assign_add"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1.0, ValueError),  # nothing is broadcast
        ([1.0], ValueError),
        ([[1.0, 2.0]], ValueError),
        (np.ones(2, "float64"), ValueError),
        (np.ones(2, "int32"), ValueError),
        (np.ones(2, "float16"), ValueError),
        (np.ones(3, "float32"), ValueError),
        (np.array([True, False]), TypeError),
        ([1j, 2j], ValueError),
        ([[1.0], [1.0, 2.0]], ValueError),
        (None, TypeError),
        ("ab", TypeError),
    ],
)
def test_what_does_not_fit_changes_nothing(place, method, value, error):
    variable = gr.Variable([1.0, 2.0], "w", device=place)
    with pytest.raises(error):
        getattr(variable, method)(value)
    check(variable, np.array([1.0, 2.0], "float32"))


@pytest.mark.parametrize("method", ["assign", "assign_add"])
def test_the_text_names_both(place, method):
    variable = gr.Variable([1.0, 2.0], "w", device=place)
    with pytest.raises(ValueError, match=r"float64\[3\].*'w' is float32\[2\]"):
        getattr(variable, method)(np.ones(3))
    other = gr.Variable([5.0, 2.0], device=place)
    getattr(variable, method)(other)  # another Variable is a value like any other
    check(variable, np.array([5, 2] if method == "assign" else [6, 4], "float32"))
    check(other, np.array([5, 2], "float32"))
    with gr.open_mesh(1, backend="sim") as mesh, pytest.raises(gr.errors.DeviceMismatchError):
        getattr(variable, method)(mesh.devices[0].put(np.ones(2, "float32")))
    step = gr.Variable(1, trainable=False, device=place)
    with pytest.raises(ValueError, match="int64 is wanted"):
        getattr(step, method)(1.5)
    assert int(step) == 1


def test_assigned_memory_is_not_kept(place):
    variable = gr.Variable([1.0, 2.0], device=place)
    value = np.array([3.0, 4.0], "float32")
    value.flags.writeable = False
    variable.assign(value)
    source = value.copy()
    variable.assign(source)
    source[...] = 9
    check(variable, value)
    variable.assign_add(value)
    assert value.tolist() == [3.0, 4.0]


def test_a_copy_of_the_variable_may_be_what_is_added_to_it(mesh):
    """All copies see it as it was, or they would part."""
    variable = gr.Variable([1.0, 3.0], device=mesh)
    for buffer in variable.buffers:
        before = variable.numpy()
        variable.assign_add(buffer)
        check(variable, 2 * before)
        variable.assign(buffer)
        check(variable, 2 * before)


def test_scalars_and_variables_without_elements(place):
    empty = gr.Variable(np.empty((0, 3), "float32"), device=place)
    check(empty.assign(np.empty((0, 3), "float32")), np.empty((0, 3), "float32"))
    check(empty.assign_add(np.empty((0, 3), "float32")), np.empty((0, 3), "float32"))
    scalar = gr.Variable(1.5, device=place)
    check(scalar.assign_add(1), np.float32(2.5))


def test_writing_waits_for_nothing(place):
    variable = gr.Variable([1.0, 2.0], device=place)
    mesh = variable.devices[0].mesh
    with mesh.journal() as journal:
        variable.assign([3.0, 4.0])
        variable.assign_add([1.0, 1.0])
    assert journal.syncs == 0
    assert journal.copies >= len(variable.devices)
    assert journal.launches == len(variable.devices)


def test_a_variable_of_a_closed_mesh():
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = gr.Variable([1.0], device=mesh)
    for call in (variable.numpy, lambda: variable.assign([2.0]), lambda: gr.Variable(
            [1.0], device=mesh)):  # fmt: skip
        with pytest.raises(gr.errors.BackendUnavailableError):
            call()


# -- get_variable ---------------------------------------------------------------------------------


def test_get_variable(mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.variables.default_mesh", lambda: mesh)
    variable = gr.get_variable("w", [1.0, 2.0])
    assert (variable.name, variable.trainable, variable.dtype) == ("w", True, np.float32)
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert gr.get_variable("step", 0, trainable=False).dtype == np.int64
    assert gr.get_variable("w", mesh.devices[2].put(np.ones(1))).devices == (mesh.devices[2],)
    with pytest.raises(ValueError, match="Invalid type int64"):
        gr.get_variable("step", 0)
    for name, error in [("", ValueError), (None, TypeError), (3, TypeError)]:
        with pytest.raises(error, match="name"):
            gr.get_variable(name, 1.0)


def test_no_store_remembers_names(mesh):
    one, two = (gr.get_variable("w", mesh.devices[0].put(np.ones(1))) for _ in range(2))
    assert one is not two
    one.assign([5.0])
    assert two.numpy() == 1


def test_a_custom_getter_makes_the_variable(mesh):
    calls, beside = [], []

    def getter(make, name, initial_value, **given):
        calls.append((name, initial_value, given))
        beside.append(make(f"shadow/{name}", initial_value, trainable=False, dtype="float64",
                           device=mesh.devices[1]))  # fmt: skip
        return make(name, initial_value, device=mesh, **given)

    made = gr.get_variable("w", [1.0], custom_getter=getter)
    assert (made.name, made.trainable, made.devices) == ("w", True, mesh.devices)
    assert (beside[0].name, beside[0].trainable) == ("shadow/w", False)
    assert (beside[0].dtype, beside[0].devices) == (np.float64, (mesh.devices[1],))
    step = gr.get_variable("step", 0, trainable=False, custom_getter=getter)
    assert step.dtype == np.int64
    assert calls == [("w", [1.0], {"trainable": True}), ("step", 0, {"trainable": False})]


def test_a_getter_that_gives_no_variable_is_refused():
    for getter, match in [(lambda *given, **more: None, "no Variable"), (3, "cannot be called")]:
        with pytest.raises(TypeError, match=match):
            gr.get_variable("w", 1.0, custom_getter=getter)


# -- views ----------------------------------------------------------------------------------------


def test_a_view_is_the_memory_of_the_copy_that_is_read(mesh):
    variable = gr.Variable(np.arange(6.0).reshape(2, 3), device=mesh)
    for index in range(len(mesh)):
        with gr.replica(index):
            for kind in (None, "numpy"):
                view = variable.array(kind)
                assert view.ctypes.data == variable.buffers[index].address
                assert (view.shape, view.dtype) == ((2, 3), variable.dtype)
    assert variable.array("buffer") is variable.buffers[0]
    first = variable.array()
    variable.assign_add(np.ones((2, 3)))
    assert first.tolist() == [[1, 2, 3], [4, 5, 6]], "what comes later shows in it"


def test_a_kind_that_cannot_be_is_refused(mesh):
    variable = gr.Variable([1.0], device=mesh)
    for kind in ("cupy", "jax", "list", ""):
        with pytest.raises(ValueError, match="as_kind"):
            variable.array(kind)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_view_for_torch(mesh, dtype):
    import torch

    variable = gr.Variable([1.0, 2.0], dtype=dtype, device=mesh)
    view = variable.array("torch")
    assert isinstance(view, torch.Tensor)
    assert view.dtype is getattr(torch, dtype)
    assert view.data_ptr() == variable.buffers[0].address
    gr.GradientDescentOptimizer(1.0).apply_gradients([(view.clone(), variable)])
    assert view.tolist() == [0.0, 0.0]


def test_bfloat16_by_its_name(place):
    variable = gr.Variable([1.0, 2.0], dtype="bfloat16", device=place)
    check(variable, np.array([1, 2], as_dtype("bfloat16")))
