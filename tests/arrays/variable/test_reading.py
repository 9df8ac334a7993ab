"""Variables are read on the device of a replica, as copies or as views."""

import numpy as np
import pytest
from support.exact_data import same_copies
from support.libraries import torch

import gradreduce as gr


def test_one_copy_on_each_device(mesh):
    variable = gr.Variable([1.0, 2.0], device=mesh)
    assert variable.devices == mesh.devices
    assert [buffer.device for buffer in variable.buffers] == list(mesh.devices)
    assert len({buffer.block for buffer in variable.buffers}) == len(mesh)
    part = gr.Variable([1.0], device=mesh[[3, 1]])
    assert part.devices == (mesh.devices[3], mesh.devices[1])
    alone = gr.Variable([5.0], device=mesh.devices[1])
    with gr.replica(3):
        assert alone.numpy().tolist() == [5.0]


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
    read = variable.numpy()
    read[...] = 9  # a copy
    assert same_copies(variable, np.array([[1, 2], [3, 4]], "float32"))
    read = variable.numpy()
    variable.assign([[0, 0], [0, 0]])
    assert read.tolist() == [[1, 2], [3, 4]]


def test_attributes_of_arrays_raise_and_name_read(place):
    variable = gr.Variable([5.0, 7.0], device=place)
    for name in ("real", "flat", "sort", "fill"):
        assert not hasattr(variable, name)
        with pytest.raises(
            AttributeError, match=rf"no attribute '{name}'; use variable\.read\(\) or"
        ):
            getattr(variable, name)
    for found in (divmod(variable, 2.0), np.divmod(variable, 2.0)):
        assert [each.tolist() for each in found] == [[2.0, 3.0], [1.0, 1.0]]
    assert [each.tolist() for each in divmod(12.0, variable)] == [[2.0, 1.0], [2.0, 5.0]]


# -- views ----------------------------------------------------------------------------------------


def test_a_view_shares_the_memory_of_the_copy_that_is_read(mesh):
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


def test_an_unavailable_output_type_is_refused(mesh):
    variable = gr.Variable([1.0], device=mesh)
    for kind in ("cupy", "jax", "list", ""):
        with pytest.raises(ValueError, match="output_type"):
            variable.array(kind)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_view_for_torch(mesh, dtype):
    variable = gr.Variable([1.0, 2.0], dtype=dtype, device=mesh)
    view = variable.array("torch")
    assert isinstance(view, torch.Tensor)
    assert view.dtype is getattr(torch, dtype)
    assert view.data_ptr() == variable.buffers[0].address
    gr.GradientDescentOptimizer(1.0).apply_gradients([(view.clone(), variable)])
    assert view.tolist() == [0.0, 0.0]
