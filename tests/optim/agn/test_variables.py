"""The variables of a getter, their devices at the center, and the default center."""

import gc
import weakref

import numpy as np
import pytest
from optim.agn.team import pair

import gradreduce as gr
from gradreduce.errors import DeviceMismatchError


def made(getter, name="v", value=0.0, **options):
    return gr.get_variable(name, value, custom_getter=getter, **options)


def test_a_trainable_variable_has_three_copies(mesh):
    """The sum of half precision is wider; a part of a mesh mirrors."""
    home, center = mesh[:0:-1], gr.AGNCenter(mesh.devices[1])
    getter = gr.AGNCustomGetter(home, center=center)
    var = made(getter, "layer/w", np.array([[1, 2]], "float16"))
    found = [var, getter.center_variable(var), getter.accumulation(var)]
    names = ["layer/w", "global_center_variable/layer/w", "grad_variable/layer/w"]
    assert [each.name for each in found] == names
    assert [each.trainable for each in found] == [True, False, False]
    assert [each.devices for each in found] == [home.devices, (mesh.devices[1],), home.devices]
    assert [each.dtype.name for each in found] == ["float16", "float16", "float32"]
    assert [each.numpy().tolist() for each in found] == [[[1, 2]], [[1, 2]], [[0, 0]]]
    assert center.variables() == [getter.center_variable(var)]


def test_each_worker_uses_its_own_variable_again(mesh):
    center = gr.AGNCenter(mesh)
    one, two = (gr.AGNCustomGetter(mesh.devices[place], center=center) for place in (0, -1))
    mine, yours = (made(getter, value=np.zeros, shape=(2,)) for getter in (one, two))
    assert made(one, value=None, reuse=True) is mine
    assert made(two, value=np.ones, shape=(2,), reuse=True) is yours
    assert yours.devices == (mesh.devices[-1],)
    counter = made(one, "step", 0, trainable=False)
    assert made(one, "step", None, reuse=True) is counter
    for getter, options, match in [
        (one, {"shape": (3,)}, r"has shape \(2,\), not \(3,\)"),
        (one, {"dtype": "float16"}, "has dtype float32, not float16"),
    ]:
        with pytest.raises(ValueError, match=match):
            made(getter, value=None, reuse=True, **options)
    with pytest.raises(ValueError, match="made no 'step'"):
        made(two, "step", None, reuse=True)
    # Two would share a center variable, and one launch would push to it twice.
    text = "this getter has already created a variable named 'v'.*reuse=True to get it"
    with pytest.raises(ValueError, match=text):
        made(one)
    assert len(one._shared.centers) == len(center.variables()) == 1


def test_others_pass_through(mesh):
    getter = gr.AGNCustomGetter(mesh.devices[1], center=gr.AGNCenter(mesh))
    step = made(getter, "step", 0, trainable=False)
    assert (step.devices, step.trainable, step.name) == ((mesh.devices[1],), False, "step")
    assert getter.center.variables() == []
    for look in (getter.center_variable, getter.accumulation):
        with pytest.raises(KeyError, match=r"<Variable 'step' .* was not created by"):
            look(step)
        with pytest.raises(KeyError, match="'v' was not created by"):
            look("v")
    made(getter, "step", 1, trainable=False)  # of these two may have one name


def test_the_second_worker_finds_what_the_first_has_made(mesh):
    center = gr.AGNCenter(mesh)
    first, second = (gr.AGNCustomGetter(mesh.devices[place], center=center) for place in (0, 1))
    one, two = made(first, value=[1.0]), made(second, value=[2.0])
    assert first.center_variable(one) is second.center_variable(two)
    assert first.center_variable(one).numpy() == [1]
    assert two.numpy() == [2]  # until it is told to start
    for wrong, text in [([1.0, 2.0], r"'v' is float32\[2\] at this worker, but float32\[1\] at"),
                        (np.zeros(1), r"'v' is float64\[1\] at")]:  # fmt: skip
        third = gr.AGNCustomGetter(mesh.devices[0], center=center)
        with pytest.raises(ValueError, match=text):
            made(third, value=wrong)
        assert (list(third._shared.centers), len(center.variables())) == ([], 1)
        assert made(third, value=[3.0]).numpy() == [3]


def test_whole_variables_are_placed_on_the_device_with_the_fewest_bytes(mesh):
    center = gr.AGNCenter(mesh)
    getter = gr.AGNCustomGetter(mesh.devices[0], center=center)
    sizes = [100, 1, 30, 30, 7, 64, 30, 2, 2, 90]
    held = dict.fromkeys(mesh.devices, 0)
    for place, size in enumerate(sizes):
        dtype = ("float32", "float64")[place % 2]
        var = made(getter, f"v{place}", np.zeros(size, dtype))
        (home,) = getter.center_variable(var).devices
        assert held[home] == min(held.values())
        held[home] += size * np.dtype(dtype).itemsize
    assert min(held.values()) > 0


def test_the_process_wide_center_lives_as_long_as_a_getter_holds_it(mesh):
    """Two trainings, one after the other, share no values, without garbage collection."""
    gc.disable()
    try:
        for start in (1.0, 2.0):
            getters = [gr.AGNCustomGetter(mesh.devices[place]) for place in (0, 1)]
            assert getters[0].center is getters[1].center
            assert getters[0].center.devices == mesh.devices
            pairs = [(getter, made(getter, value=[start])) for getter in getters]
            for getter, var in pairs:
                optimizer = gr.AGNOptimizer(gr.MomentumOptimizer(0.5, 0.5), 2, getter, 1)
                with optimizer.make_session_run_hook(True, 0):
                    optimizer.apply_gradients([(np.ones(1, "float32"), var)])
            assert getters[0].center_variable(pairs[0][1]).numpy() == [start - 1.25]
            alive = weakref.ref(getters[0].center)
            del getters[1]
            assert gr.AGNCustomGetter(mesh.devices[0]).center is alive()
            del getters, pairs, getter, var, optimizer
            assert alive() is None
    finally:
        gc.enable()


def test_what_a_getter_is_given(mesh):
    with gr.open_mesh(2, backend="sim") as other:
        for args, options, error, text in [
            (([mesh.devices[0]],), {}, TypeError, r"worker_device=\[.*\] is not a Mesh, a Device"),
            ((mesh,), {"center": 3}, TypeError, "center=3 is not an AGNCenter"),
            ((other,), {"center": gr.AGNCenter(mesh)}, DeviceMismatchError,
             "sim:0 of the worker and sim:0 of the center belong to different"),
        ]:  # fmt: skip
            with pytest.raises(error, match=text):
                gr.AGNCustomGetter(*args, **options)
        kept = gr.AGNCustomGetter(mesh.devices[0])
        with pytest.raises(DeviceMismatchError, match="belong to different meshes"):
            gr.AGNCustomGetter(other.devices[0])
        assert kept.center.variables() == []


def test_a_device_that_is_closed_makes_no_center(mesh):
    with gr.open_mesh(1, backend="sim") as closed:
        pass
    with pytest.raises(gr.errors.BackendUnavailableError, match="closed"):
        gr.AGNCustomGetter(closed.devices[0])
    assert gr.AGNCustomGetter(mesh.devices[0]).center.devices == mesh.devices


def test_values_are_those_between_two_pushes(mesh, monkeypatch):
    starts = {"b": np.zeros(2, "float32"), "a": np.full(3, 4, "float16")}
    (worker,) = pair(mesh, starts=starts, num=1)
    center, download = worker.getter.center, gr.Buffer.numpy
    ones = {name: np.ones_like(value) for name, value in starts.items()}

    def push_first(buffer):
        monkeypatch.undo()
        worker.step(ones)
        return download(buffer)

    monkeypatch.setattr(gr.Buffer, "numpy", push_first)
    for wanted in ([("a", [4.0] * 3), ("b", [0.0] * 2)], [("a", [3.5] * 3), ("b", [-0.5] * 2)]):
        found = center.values()
        assert [(name, value.tolist()) for name, value in found.items()] == wanted
        assert [each.dtype for each in found.values()] == ["float16", "float32"]
        for value in found.values():  # belongs to the caller
            value[...] = 7
