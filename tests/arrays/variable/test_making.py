"""Variables copy the caller's values and do not use the caller's memory."""

import gc

import numpy as np
import pytest
from support.exact_data import DTYPES, FLOATS, exact_data, same_copies

import gradreduce as gr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_of_an_array_is_kept_or_one_that_is_asked_for(place, dtype):
    values = exact_data((2, 3), dtype)
    variable = gr.Variable(values, trainable=False, device=place)
    assert (variable.dtype, variable.shape) == (dtype, (2, 3))
    assert (variable.ndim, variable.size) == (2, 6)
    assert same_copies(variable, values)
    if dtype in FLOATS:
        for value in (2, 2.5, [1, 2.5], np.arange(3), np.ones(2, "float64")):
            for asked in (dtype, dtype.name):
                variable = gr.Variable(value, dtype=asked, device=place)
                assert same_copies(variable, np.asarray(value).astype(dtype))
                assert variable.trainable
        return
    for options in ({}, {"dtype": dtype}):
        with pytest.raises(ValueError, match=f"Invalid type {dtype} of a trainable variable"):
            gr.Variable(np.ones(2, dtype), device=place, **options)
    assert gr.Variable(np.ones(2, dtype), trainable=False, device=place).trainable is False


def test_the_dtype_of_numbers_and_lists(place):
    for value, dtype in [
        (1, "int64"), ([1, 2], "int64"), (1.0, "float32"), ([1, 2.0], "float32"),
        ([], "float32"), (1j, "complex128"), (np.float64(1), "float64"), (np.int8(1), "int8"),
    ]:  # fmt: skip
        assert gr.Variable(value, trainable=False, device=place).dtype == dtype
    with pytest.raises(ValueError, match="trainable=False"):
        gr.Variable(0, device=place)
    for value, options, error in [
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
    ]:
        with pytest.raises(error):
            gr.Variable(value, **{"trainable": False, **options}, device=place)


@pytest.fixture
def default(mesh, monkeypatch):
    monkeypatch.setattr("gradreduce.arrays.variable.default_mesh", lambda: mesh)


def test_values_are_copied_and_never_written(place):
    first, second = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    source = first.copy()
    variable = gr.Variable(source, device=place)
    for write, wanted in ((variable.assign, second), (variable.assign_add, 2 * second)):
        source[...] = second
        assert same_copies(variable, first)
        write(source)
        source[...] = 9
        assert same_copies(variable, wanted)
        first = wanted
    second.flags.writeable = False
    assert same_copies(variable.assign(second).assign_add(second), 2 * second)
    assert (source == 9).all()


def test_a_buffer_is_copied_and_names_the_default_device(mesh):
    buffer = mesh.devices[3].put(np.array([1.0, 2.0]))
    variable = gr.Variable(buffer)
    assert variable.devices == (mesh.devices[3],)
    mesh.devices[3].release(buffer)[...] = 9
    assert variable.numpy().tolist() == [1.0, 2.0]
    spread = gr.Variable(buffer, device=mesh, dtype="float16")
    assert same_copies(spread, np.array([9.0, 9.0], "float16"))
    with gr.open_mesh(1, backend="sim") as other, pytest.raises(gr.errors.DeviceMismatchError):
        gr.Variable(buffer, device=other)


def test_without_a_device_it_lies_on_the_first_of_the_default_mesh(default, mesh):
    for value in (1.0, [[1.0]], np.ones(2)):
        assert gr.Variable(value).devices == mesh.devices[:1]


def test_with_a_device_no_other_mesh_is_opened(mesh, monkeypatch):
    opened = []
    monkeypatch.setattr("gradreduce.backends._default", opened)
    var = gr.Variable([1.0, 2.0], device=mesh)
    assert var.assign([3, 4]).assign_add([1.0, 1.0]).numpy().tolist() == [4.0, 5.0]
    assert gr.Variable(1, trainable=False, device=mesh).dtype == np.int64
    assert opened == []


def test_names(mesh):
    first, second = (gr.Variable(1.0, device=mesh) for _ in range(2))
    assert first.name != second.name
    assert first.name.startswith("Variable")
    assert second.name.startswith("Variable_")
    named = gr.Variable(1.0, "weights", device=mesh)
    assert named.name == "weights"
    assert repr(named) == "<Variable 'weights' float32[] on sim:0, sim:1, sim:2, sim:3>"


# -- get_variable ---------------------------------------------------------------------------------


def test_get_variable(default, mesh):
    variable = gr.get_variable("w", [1.0, 2.0])
    assert (variable.name, variable.trainable, variable.dtype) == ("w", True, np.float32)
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert gr.get_variable("step", 0, trainable=False).dtype == np.int64
    with pytest.raises(ValueError, match="Invalid type int64"):
        gr.get_variable("step", 0)
    for name, error in [("", ValueError), (None, TypeError), (3, TypeError)]:
        with pytest.raises(error, match="name"):
            gr.get_variable(name, 1.0)
    one, two = (gr.get_variable("w", mesh.devices[2].put(np.ones(1))) for _ in range(2))
    assert one.devices == (mesh.devices[2],)
    one.assign([5.0])
    assert one is not two and two.numpy() == 1
    assert gr.get_variable("w", reuse=True) is two
    assert gr.get_variable("v", lambda: [1.0, 2.0]).numpy().tolist() == [1.0, 2.0]
    made = gr.get_variable("v", lambda: np.zeros(3), dtype="bfloat16", trainable=False)
    assert (made.shape, made.dtype.name, made.trainable) == ((3,), "bfloat16", False)
    assert gr.get_variable("v", 1, dtype="float32").dtype == np.float32


def test_an_initializer_receives_shape_and_dtype(default):
    asked = []

    def initializer(shape, dtype):
        asked.append((shape, dtype))
        return np.full(shape, 3, np.float64)

    for dtype, wanted in [(None, "float32"), ("float16", "float16"), (np.float64, "float64")]:
        made = gr.get_variable("v", initializer, shape=[2, 3], dtype=dtype)
        assert (made.shape, made.dtype.name, made.name) == ((2, 3), wanted, "v")
        assert (made.numpy() == 3).all()
    assert asked == [((2, 3), np.dtype(name)) for name in ("float32", "float16", "float64")]
    assert gr.get_variable("scalar", np.ones, shape=()).numpy() == 1
    generator = np.random.default_rng(0)
    assert gr.get_variable("n", generator.standard_normal, shape=(4,)).shape == (4,)


def test_invalid_arguments_of_get_variable(default):
    gc.collect()

    def wrong(shape, dtype):
        return np.zeros(3, dtype)

    for args, options, match in [
        ((), {}, "initial_value of 'w' is missing"),
        ((), {"shape": (2,)}, r"shape=\(2,\) of 'w': initial_value must be an initializer"),
        (([1.0, 2.0],), {"shape": (2,)}, "initial_value must be an initializer"),
        ((wrong,), {"shape": (2,)}, r"zer of 'w' returned shape \(3,\); expected shape=\(2,\)"),
        ((), {"reuse": True}, "reuse=True: get_variable has made no 'w' that still exists"),
    ]:
        with pytest.raises(ValueError, match=match):
            gr.get_variable("w", *args, **options)
        with pytest.raises(ValueError, match="no 'w' that still exists"):
            gr.get_variable("w", reuse=True)
    for getter, match in [(lambda *given, **more: None, "returned None"), (3, "is not callable")]:
        with pytest.raises(TypeError, match=match):
            gr.get_variable("w", 1.0, custom_getter=getter)


def test_a_variable_is_reused_if_it_matches_the_arguments(default):
    made = gr.get_variable("kept", np.zeros, shape=(2, 3), dtype="float16")
    for args, options in [
        ((), {}),
        ((np.ones,), {"shape": [2, 3]}),  # not called
        ((), {"dtype": "float16"}),
        ((np.ones((2, 3), "float16"),), {}),
        ((lambda: 1 / 0,), {"trainable": False}),
    ]:
        assert gr.get_variable("kept", *args, reuse=True, **options) is made
    for args, options, match in [
        ((), {"shape": (3, 2)}, r"<Variable 'kept' .*> has shape \(2, 3\), not \(3, 2\)"),
        ((), {"shape": ()}, r"has shape \(2, 3\), not \(\)"),
        ((), {"dtype": "float32"}, "has dtype float16, not float32"),
        ((np.ones((2, 3)),), {}, "has dtype float16, not float64"),
        ((np.ones((2, 2), "float16"),), {}, r"not \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=f"^reuse=True: .*{match}"):
            gr.get_variable("kept", *args, reuse=True, **options)
    with pytest.raises(TypeError, match="reuse=1 must be True or False"):
        gr.get_variable("kept", reuse=1)


def test_a_custom_getter_makes_the_variable(mesh):
    calls, beside = [], []

    def getter(make, name, initial_value=None, **given):
        calls.append((name, initial_value, given))
        if given.get("reuse"):
            return make(name, initial_value, **given)
        beside.append(make(f"shadow/{name}", np.ones(1), trainable=False, dtype="float64",
                           device=mesh.devices[1]))  # fmt: skip
        return make(name, initial_value, device=mesh, **given)

    made = gr.get_variable("w", [1.0], custom_getter=getter)
    assert (made.name, made.trainable, made.devices) == ("w", True, mesh.devices)
    assert (beside[0].name, beside[0].trainable) == ("shadow/w", False)
    assert (beside[0].dtype, beside[0].devices) == (np.float64, (mesh.devices[1],))
    step = gr.get_variable("step", 0, trainable=False, custom_getter=getter)
    assert step.dtype == np.int64
    shaped = gr.get_variable("s", np.zeros, shape=(2,), dtype="float32", custom_getter=getter)
    assert shaped.shape == (2,)
    assert gr.get_variable("s", reuse=True, custom_getter=getter) is shaped
    assert calls == [
        ("w", [1.0], {"trainable": True}),
        ("step", 0, {"trainable": False}),
        ("s", np.zeros, {"trainable": True, "shape": (2,), "dtype": "float32"}),
        ("s", None, {"trainable": True, "reuse": True}),
    ]
