"""Flat buffers and arrays written in place on GPUs, in the order of their library's streams."""

from itertools import chain

import cupy
import numpy as np
import pytest
from device.contract import data
from fake_cupy import foreign
from fake_cupy.foreign import Tensor, made_on
from support.exact_data import same

import gradreduce as gr
from gradreduce.arrays.caller_streams import StreamScope
from gradreduce.arrays.convert import to_buffer
from gradreduce.arrays.outputs import as_out, release_outputs
from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError

pytestmark = pytest.mark.fake_cupy
SHAPES = [(7, 30), (5,)] * 3
SUM = gr.ReduceOp.SUM
torch = foreign.torch


def fill(rows, add: int) -> None:
    """Fills like a user on the current stream."""
    for replica, row in enumerate(rows):
        for place, array in enumerate(row):
            array[...] = data(array.shape, seed=replica + place) + add


def sums(num_replicas: int, add: int) -> list[np.ndarray]:
    return [
        sum(data(shape, seed=replica + place) + add for replica in range(num_replicas))
        for place, shape in enumerate(SHAPES)
    ]


def test_pytorchs_gradients_are_reduced_where_they_are(here, mesh, torch):
    mesh = mesh[0:2]
    flat = mesh.flat_buffer(SHAPES, "float32")
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    tensors = flat.arrays("torch")
    for turn in range(3):
        with torch.stream:  # like backward(): adds to the zeros of zero()
            for row in tensors:
                for tensor in row:
                    assert not tensor.array.get().any()
            fill([[tensor.array for tensor in row] for row in tensors], turn)
        with mesh.journal() as journal:
            reduced = ops.all_reduce(tensors, SUM)
        assert [record.name for record in journal.records] == ["all_sum"]
        with mesh.journal() as journal:
            assert here.counted(flat.zero)["record"] == 2  # one for inputs, one for results
        assert [record.kind for record in journal.records] == ["fill", "fill"]
        with torch.stream:
            for tensor, expected in zip(reduced[1], sums(2, turn), strict=True):
                assert same(tensor.array.get(), expected)


def tensors_on(torch, mesh, add: int = 0, requires_grad: bool = True) -> list[list[Tensor]]:
    made = []
    for replica, device in enumerate(mesh):
        with torch.on(device.physical):
            rows = [data(s, seed=replica + place) + add for place, s in enumerate(SHAPES)]
            made.append([Tensor(cupy.asarray(row)) for row in rows])
    for tensor in chain(*made):
        tensor.requires_grad = requires_grad
    return made


def all_equal(torch, tensors, wanted) -> bool:
    """Reads each array in the order of its library's stream."""
    found = []
    for tensor in tensors:
        with torch.on(tensor.device.index):
            found.append(tensor.array.get())
    return all(same(*each) for each in zip(found, wanted, strict=True))


def test_attached_gradients_of_pytorch_are_attached_again_in_the_order_of_its_stream(mesh, torch):
    parameters = tensors_on(torch, mesh)
    flat, ops = mesh.flat_buffer(SHAPES, "float32"), gr.HierarchicalCopyAllReduce(mesh=mesh)
    steps = [flat.prepare_all_reduce(SUM, cross_device_ops=ops)]  # before the library has an array
    flat.attach(parameters)
    for _ in range(2):
        for parameter in chain(*parameters):
            parameter.grad.copy_(parameter)  # in place, as ``backward()`` does
        steps[1:] = [flat.prepare_all_reduce(SUM, cross_device_ops=ops)]
    for rows in (flat.arrays("torch"), flat.views):
        columns = list(zip(*rows, strict=True))
        pairs = [(value, value) for value in (gr.PerReplica(column, mesh) for column in columns)]
        steps.append(ops.prepare(SUM, pairs, out=columns))
    for turn in range(8):
        grads = tensors_on(torch, mesh, turn, requires_grad=False)
        for parameter, grad in zip(chain(*parameters), chain(*grads), strict=True):
            if turn < 4:
                parameter.grad = grad
            else:
                parameter.grad.copy_(grad)
        steps[turn % 4]()
        for row, views in zip(parameters, flat.views, strict=True):
            assert [each.grad.data_ptr() for each in row] == [view.address for view in views]
            assert all_equal(torch, [each.grad for each in row], sums(3, turn))


def test_a_missing_or_moved_gradient_is_detected(mesh, torch):
    parameters = tensors_on(torch, mesh)
    flat = mesh.flat_buffer(SHAPES, "float32")
    step = flat.prepare_all_reduce(SUM, cross_device_ops=gr.HierarchicalCopyAllReduce(mesh=mesh))
    flat.attach(parameters)
    for parameter in chain(*parameters):
        parameter.grad.copy_(parameter)
        parameter.grad = None
    step()
    for row in parameters:
        zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
        assert all_equal(torch, [each.grad for each in row], zeros)
    parameters[2][0].grad, parameters[2][1].grad = parameters[0][0], None
    with pytest.raises(DeviceMismatchError, match=r"parameters\[2\]\[0\]\.grad is on"):
        step()
    assert parameters[2][1].grad is None


def test_arrays_of_a_flat_buffer_are_fenced_once_per_call(here, mesh, torch):
    device = mesh.devices[1]
    row = mesh.flat_buffer(SHAPES, "float32").arrays("torch")[1]
    before = here.counts["record"]
    with StreamScope(reads=False):
        buffers = [to_buffer(tensor, device) for tensor in row]
    assert here.counts["record"] - before == 1
    assert len({buffer.block for buffer in buffers}) == 1
    assert buffers[0].block.owned
    view = to_buffer(row[0], mesh.devices[0])  # on the same GPU: like any other array
    assert (view.device, view.block.owned) == (mesh.devices[0], False)


def test_a_prepared_step_is_ordered_with_pytorchs_stream_by_release_and_adopt(mesh, torch):
    """Its values are the views, of which PyTorch's stream knows nothing."""
    mesh = mesh[0:2]
    flat = mesh.flat_buffer(SHAPES, "float32")
    tensors = flat.arrays("torch")
    values = [gr.PerReplica(column, mesh) for column in zip(*flat.views, strict=True)]
    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    step = ops.prepare(SUM, [(value, value) for value in values])
    for turn in (1, 2):
        flat.release()
        with torch.stream:
            fill([[tensor.array for tensor in row] for row in tensors], turn)
        flat.adopt()
        with mesh.journal() as journal:
            results = step()
        assert [record.name for record in journal.records] == ["all_sum"]
    for result, expected in zip(results, sums(2, 2), strict=True):
        assert same(result.buffers[1].numpy(), expected)


def test_outs_are_written_in_place_in_the_order_of_their_streams(here, mesh, torch):
    device = mesh.devices[1]
    mine = cupy.cuda.Stream(non_blocking=True)
    halves = data((7, 30)).astype(as_dtype("bfloat16"))
    flat = mesh.flat_buffer([(7, 30)], "float32").arrays("torch")[1][0]
    with mine:
        cupys = cupy.asarray(data((7, 30)))
        tensors = [Tensor(made_on(torch.stream, data((7, 30)))), flat]
        brain = Tensor(made_on(torch.stream, halves), "bfloat16")
        before = here.counts["record"]
        with StreamScope(reads=False):
            outs = [as_out(each, device, (7, 30), np.dtype("float32")) for each in tensors]
            outs.append(as_out(cupys, device, (7, 30), np.dtype("float32")))
            outs.append(as_out(brain, device, (7, 30), halves.dtype))
        assert here.counts["record"] - before == 2  # CuPy's stream and PyTorch's
        for out in outs:
            values = data((7, 30), seed=9).astype(out.buffer.dtype)
            device.copy(out.buffer, device.upload(values))
        found = here.counted(lambda: release_outputs(outs))
        assert (found["record"], found["wait"]) == (1, 2)  # both streams wait for one event
        assert same(cupys.get(), data((7, 30), seed=9))
    with torch.stream:
        for tensor in tensors:
            assert same(tensor.array.get(), data((7, 30), seed=9))
            assert tensor.version == 1
        assert same(brain.array.get(), data((7, 30), seed=9).astype(halves.dtype))
    assert outs[1].buffer.block.owned
    assert outs[1].buffer.address == flat.array.data.ptr


def test_outs_on_other_devices_or_not_dense_are_refused(here, mesh, torch):
    device, far = mesh.devices[0], mesh.devices[2]
    array, strided = cupy.asarray(data((7, 30))), cupy.asarray(data((7, 60)))[:, ::2]
    flat_array = mesh.flat_buffer([(7, 30)], "float32").arrays()[1][0]
    for out, home, error, match in [
        (array, far, DeviceMismatchError, "out is on GPU 0; expected it on <device cuda:2"),
        (Tensor(array), far, DeviceMismatchError, "out is on GPU 0"),
        (np.zeros((7, 30), "f4"), device, DeviceMismatchError, "out is in host memory"),
        (flat_array, device, DeviceMismatchError, "in a flat buffer of cuda:1"),
        (strided, device, ValueError, "not dense, or not aligned"),
        (Tensor(strided), device, ValueError, "not dense, or not aligned"),
    ]:
        before = here.counts.get("record", 0)
        with mesh.journal() as journal, pytest.raises(error, match=match):
            as_out(out, home, (7, 30), np.dtype("float32"))
        assert journal.records == []
        assert here.counts.get("record", 0) == before  # no wait


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("outs", ["in place", "as they lie", "in C's order"])
def test_arrays_with_another_axis_order_are_reduced_in_memory_order(mesh, torch, library, outs):
    """On their library's streams; an out with other strides is copied to, also there."""
    stream = torch.on if library == "torch" else cupy.cuda.Device

    def made(values, turned):
        rows = []
        for device in mesh:
            with stream(device.physical):
                array = cupy.asarray(np.ascontiguousarray(values.T) if turned else values)
            array = array.transpose((1, 0)) if turned else array
            rows.append([Tensor(array) if library == "torch" else array])
        return rows

    ops = gr.HierarchicalCopyAllReduce(mesh=mesh)
    for turn in range(2):
        grads = made(data((7, 30), seed=turn), turned=True)
        out = grads if outs == "in place" else made(np.zeros((7, 30), "f4"), outs != "in C's order")
        with mesh.journal() as journal:
            assert ops.all_reduce(grads, SUM, out=out) is out
        assert journal.uploads == journal.syncs == 0
        found = ops.all_reduce(grads, SUM) if outs != "in place" else out
        for (each,) in (*out, *found):
            array = each.array if library == "torch" else each
            with stream(array.device.id):
                assert same(array.get(), 3 * data((7, 30), seed=turn))
        assert [row[0].is_contiguous() if library == "torch" else row[0].flags.c_contiguous
                for row in found] == [False] * 3  # fmt: skip
