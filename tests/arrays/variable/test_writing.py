"""A Variable is written on every device alike, or not at all."""

import operator

import numpy as np
import pytest
from support.exact_data import DTYPES, FLOATS, exact_data, same, same_copies
from support.libraries import torch

import gradreduce as gr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_assign_and_assign_add(place, mesh, dtype):
    for shape in ((2, 5), (), (0, 3)):
        start, value, delta = map(np.asarray, exact_data((3, *shape), dtype))
        variable = gr.Variable(start, trainable=False, device=place)
        assert variable.assign(value) is variable
        assert same_copies(variable, value)
        with np.errstate(all="ignore"):
            wanted = np.asarray(value + delta)
        assert variable.assign_add(delta) is variable
        assert same_copies(variable, wanted)
        for device in mesh.devices:  # from each device of the mesh
            variable.assign(device.put(value)).assign_add(device.put(delta))
            assert same_copies(variable, wanted)
        assert same(value, np.asarray(exact_data((3, *shape), dtype)[1]))


def test_numbers_and_lists_become_the_variables_dtype(place):
    for dtype in FLOATS:
        for value in (5, 5.5, [[1, 2.5]], ((1, 2),)):
            variable = gr.Variable(np.zeros(np.shape(value)), dtype=dtype, device=place)
            assert same_copies(variable.assign(value), np.asarray(value).astype(dtype))
            assert same_copies(variable.assign_add(value), (2 * np.asarray(value)).astype(dtype))
    variable = gr.Variable(np.array([2048.0]), dtype="float16", device=place)
    variable.assign_add([3])  # in float32
    assert same_copies(variable, np.array([2052], "float16"))
    step = gr.Variable(0, "global_step", trainable=False, device=place)
    step.assign_add(1).assign_add(np.int64(10)).assign_add(-1).assign_add(2)
    assert int(step) == 12
    assert same_copies(step, np.int64(12))


@pytest.mark.parametrize("method", ["assign", "assign_add"])
def test_incompatible_values_change_nothing(place, method):
    variable = gr.Variable([1.0, 2.0], "w", device=place)
    step = gr.Variable(1, trainable=False, device=place)
    for value, error, text in [
        (1.0, ValueError, None),  # nothing is broadcast
        ([1.0], ValueError, None),
        ([[1.0, 2.0]], ValueError, None),
        (np.ones(2, "float64"), ValueError, None),
        (np.ones(2, "int32"), ValueError, None),
        (np.ones(2, "float16"), ValueError, None),
        (np.ones(3), ValueError, r"float64\[3\].*'w' is float32\[2\]"),
        (np.array([True, False]), TypeError, None),
        ([1j, 2j], ValueError, None),
        ([[1.0], [1.0, 2.0]], ValueError, None),
        (None, TypeError, None),
        ("ab", TypeError, None),
    ]:
        with pytest.raises(error, match=text):
            getattr(variable, method)(value)
    with gr.open_mesh(1, backend="sim") as mesh, pytest.raises(gr.errors.DeviceMismatchError):
        getattr(variable, method)(mesh.devices[0].put(np.ones(2, "float32")))
    with pytest.raises(ValueError, match="cannot convert float64 numbers to int64"):
        getattr(step, method)(1.5)
    assert int(step) == 1
    assert same_copies(variable, np.array([1.0, 2.0], "float32"))
    other = gr.Variable([5.0, 2.0], device=place)
    getattr(variable, method)(other)  # a Variable is a valid value
    assert same_copies(variable, np.array([5, 2] if method == "assign" else [6, 4], "float32"))
    assert same_copies(other, np.array([5, 2], "float32"))


def test_a_copy_of_the_variable_may_be_what_is_added_to_it(mesh):
    """All copies add its old value; otherwise they would differ."""
    variable = gr.Variable([1.0, 3.0], device=mesh)
    for buffer in variable.buffers:
        before = variable.numpy()
        variable.assign_add(buffer)
        assert same_copies(variable, 2 * before)
        variable.assign(buffer)
        assert same_copies(variable, 2 * before)


def test_writing_does_not_synchronize(place):
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


_ARRAY = np.ones((2, 2), "float32")
_OVER = {
    "+=": lambda v: operator.iadd(v, 1.0),
    "*=": lambda v: operator.imul(v, 1.0),
    "ufunc": lambda v: np.add(v, 1, out=v),
    "ufunc by place": lambda v: np.add(_ARRAY, 1, v),
    "ufunc.at": lambda v: np.add.at(v, [0], 5.0),
    "ufunc.reduce": lambda v: np.add.reduce(_ARRAY[None], out=v),
    "out": lambda v: np.clip(v, 5, 6, out=v),
    "out of plain arrays": lambda v: np.stack([_ARRAY[0], _ARRAY[0]], out=v),
    "out by place": lambda v: np.sum(_ARRAY[None], 0, None, v),
    "out by place, in C": lambda v: np.dot(_ARRAY, _ARRAY, v),
    "out of a list": lambda v: np.concatenate([_ARRAY[:1], _ARRAY[:1]], out=v),
    "einsum": lambda v: np.einsum("ij->ji", v, out=v),
    "item": lambda v: operator.setitem(v, 0, 9.0),
    "copyto": lambda v: np.copyto(v, 9.0),
    "copyto by name": lambda v: np.copyto(dst=v, src=9.0),
    "put": lambda v: np.put(v, [0], 3.0),
    "place": lambda v: np.place(v, _ARRAY > 0, [3.0]),
    "putmask": lambda v: np.putmask(v, _ARRAY > 0, [3.0]),
    "put_along_axis": lambda v: np.put_along_axis(v, np.array([[0]]), 9.0, 0),
    "fill_diagonal": lambda v: np.fill_diagonal(v, 3.0),
    "a kernel of CuPy's": lambda v: v.__cupy_override_elementwise_kernel__(np.add, v, 1, v),
    "nan_to_num": lambda v: np.nan_to_num(v, copy=False),
}


def test_numpy_cannot_write_a_variable(place):
    variable = gr.Variable([[1.0, 2.0], [3.0, 4.0]], device=place)
    for name, write in _OVER.items():
        with pytest.raises(TypeError, match="use assign or assign_add"):
            write(variable)
        assert variable.numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]], name
    plain = np.zeros((2, 2), "float32")  # may be written from it
    np.copyto(plain, variable)
    np.add.at(plain, ([0], [0]), variable[0, 0])
    assert plain.tolist() == [[2.0, 2.0], [3.0, 4.0]]
    assert np.dot(variable, _ARRAY, plain) is plain
    assert plain.tolist() == [[3.0, 3.0], [7.0, 7.0]]
    assert np.nan_to_num(variable).tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.torch
def test_torch_cannot_write_a_variable(place):
    variable = gr.Variable([1.0, 2.0], device=place)
    for write in (
        lambda: torch.add(torch.ones(2), 1, out=variable),
        lambda: torch.max(torch.ones(2, 2), 0, out=(variable, variable)),
        lambda: torch.nn.init.constant_(variable, 3.0),
        lambda: torch.nn.functional.relu(variable, inplace=True),
        lambda: torch.relu_(variable),
    ):
        with pytest.raises(TypeError, match="use assign or assign_add"):
            write()
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert torch.ones(2).add_(variable).tolist() == [2.0, 3.0]


class Shared(gr.Variable):
    """Makes Variables like those of ``gr.torch.variables``, without PyTorch."""

    is_stale = False

    @property
    def buffers(self):
        self._check_memory()
        return super().buffers

    def _check_memory(self):
        if self.is_stale:
            raise RuntimeError("stale")


ONES = np.ones(4, "f4")


WRITES = {
    "assign": lambda variable, step: variable.assign(ONES),
    "assign_add": lambda variable, step: variable.assign_add(ONES),
    "a step": lambda variable, step: step([[[ONES]], [[ONES]]]),
}


@pytest.mark.whole_product
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_call_that_would_write_stale_memory_changes_nothing(name, shard_optimizer):
    with gr.open_mesh(2, backend="sim") as mesh:
        variable = Shared(ONES, device=mesh)
        step = gr.SyncStep(
            [variable],
            gr.MomentumOptimizer(0.5, 0.5),
            gr.AllReduceCrossDeviceOps(),
            shard_optimizer=shard_optimizer,
        )
        WRITES[name](variable, step)
        before, (moment,) = variable.numpy(), step.optimizer.variables()[:1]
        moments, steps = moment.numpy(), step.global_step
        variable.is_stale = True
        with pytest.raises(RuntimeError, match="stale"):
            WRITES[name](variable, step)
        variable.is_stale = False
        assert (variable.numpy() == before).all()
        assert (moment.numpy() == moments).all()
        assert (step.global_step, step.accumulators[0].num_accumulated()) == (steps, 0)
        WRITES[name](variable, step)
