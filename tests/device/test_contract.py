"""Every backend keeps the promises of ``gradreduce/device/README.md``: memory, views, copies.

``test_contract_launch.py`` tests launches, queues and the journal, ``test_contract_lifetime.py``
lifetimes and closed meshes, ``test_contract_collective.py`` collectives.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from device.contract import FLOAT, QUEUES, SIZE, add, adopted, data, in_order, uploaded
from support.exact_data import DTYPES, same
from support.meshes import refused

from gradreduce.device import Record, as_dtype
from gradreduce.errors import DeviceMismatchError

SHAPES = [(), (1,), (0,), (2, 0, 3), (5, 7), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_uploaded_is_downloaded(one_gpu_mesh, dtype, shape):
    values = data(shape, dtype)
    for device in one_gpu_mesh:
        buffer = device.upload(values)
        assert (buffer.device, buffer.shape, buffer.dtype) == (device, shape, dtype)
        assert (buffer.size, buffer.nbytes) == (values.size, values.nbytes)
        assert same(buffer.numpy(), values)
        assert same(device.zeros(shape, dtype).numpy(), np.zeros(shape, dtype))
        made = device.empty(shape, dtype)
        assert (made.device, made.shape, made.dtype) == (device, shape, dtype)
        made = device.upload(values, out=made)
        assert same(made.numpy(), values)


def test_shapes_and_dtypes_are_checked(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    assert device.empty([2, 3], "bfloat16").shape == (2, 3)
    for wrong in [(-1,), (2, -3), (-2, -3)]:
        with pytest.raises(ValueError, match="negative extent"):
            device.empty(wrong, "float32")
        with pytest.raises(ValueError, match="negative extent"):
            device.zeros(wrong, "float32")
    for dtype in ("bool", "O", ">f4", None):
        with pytest.raises(TypeError, match="dtype"):
            device.empty((3,), dtype)
    for array in (np.zeros(3, bool), np.zeros(3, ">f4")):
        for call in (device.upload, device.put):
            with pytest.raises(TypeError, match="dtype"):
                call(array)
        with pytest.raises((TypeError, DeviceMismatchError)):  # a GPU adopts no host array at all
            device.adopt(array)


@pytest.mark.parametrize("queue", QUEUES)
def test_an_upload_reads_the_array_before_it_returns(one_gpu_mesh, queue):
    device = one_gpu_mesh.devices[1]
    whole = data((6, 8))
    values, strided = whole.copy(), whole[::2, ::-3]
    wanted = strided.copy()
    first, second = device.upload(whole, queue=queue), device.upload(strided, queue=queue)
    whole[...] = -1
    device.synchronize()
    assert same(first.numpy(), values)
    assert same(second.numpy(), wanted)


@pytest.mark.parametrize("queue", QUEUES)
def test_an_upload_into_a_buffer_returns_it(one_gpu_mesh, queue):
    device, other = one_gpu_mesh.devices
    out = device.zeros((5, 7), "float32")
    assert device.upload(data((5, 7)), out=out, queue=queue) is out
    device.synchronize()
    assert same(out.numpy(), data((5, 7)))
    for wrong in (data((7, 5)), data((35,)), data((5, 7), as_dtype("int32"))):
        with refused(one_gpu_mesh, ValueError, "upload: out=.* must have the shape"):
            device.upload(wrong, out=out, queue=queue)
    with refused(one_gpu_mesh, DeviceMismatchError, "is on another device"):
        other.upload(data((5, 7), seed=1), out=out, queue=queue)
    assert same(out.numpy(), data((5, 7)))


def test_put_shares_a_contiguous_array(one_gpu_mesh):
    device = one_gpu_mesh.devices[1]
    for array in (data((5, 7)), data(()), data((0, 3)), data((9,))[2:], data((4,), "bfloat16")):
        buffer = device.put(array)
        assert (buffer.device, buffer.shape, buffer.dtype) == (device, array.shape, array.dtype)
        assert same(buffer.numpy(), array)
        if not device.defers:  # with queued work the owner could change it too early
            assert not buffer.block.owned
            assert buffer.address == array.ctypes.data
            array[...] = 3
            assert same(buffer.numpy(), array)


def test_what_is_put_may_be_changed_at_once_where_work_is_queued(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    array = data((SIZE,))
    buffer, out = device.put(array), device.empty((SIZE,), FLOAT)
    add(device, out, buffer)
    if device.defers:
        array[...] = 3
    assert same(out.numpy(), data((SIZE,)))
    assert same(buffer.numpy(), data((SIZE,)))


@pytest.mark.parametrize("cut", [np.s_[::2], np.s_[:, 1:3], np.s_[::-1]], ids=str)
def test_put_copies_a_strided_array_and_does_not_change_it(one_gpu_mesh, cut):
    whole = data((6, 8))
    before = whole.copy()
    buffer = one_gpu_mesh.devices[0].put(whole[cut])
    assert buffer.block.owned
    add(buffer.device, buffer, buffer, buffer)
    assert same(buffer.numpy(), before[cut] + before[cut])
    assert same(whole, before)


def test_put_copies_an_array_that_is_misaligned(one_gpu_mesh):
    raw = np.zeros(21, np.uint8)
    array = raw[1:].view(np.float32)
    array[...] = data((5,))
    buffer = one_gpu_mesh.devices[0].put(array)
    assert buffer.block.owned
    assert same(buffer.numpy(), data((5,)))


def test_adopted_memory_is_shared(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    theirs = device.release(uploaded(device, 1, (5, 7)))
    buffer = device.adopt(theirs)
    assert (buffer.device, buffer.shape, buffer.dtype) == (device, (5, 7), FLOAT)
    assert same(buffer.numpy(), data((5, 7), seed=1))
    with in_order(device):
        theirs[...] = 3
        assert (buffer.numpy() == 3).all()
        add(device, buffer, buffer, buffer)
        device.synchronize()
        assert (theirs == 6).all()


def test_what_is_downloaded_is_a_copy(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    for buffer in (uploaded(device, 1), adopted(device, data((SIZE,), seed=1))):
        taken = buffer.numpy()
        add(device, buffer, buffer, buffer)
        device.synchronize()
        assert same(taken, data((SIZE,), seed=1))
        taken[...] = 0
        assert same(buffer.numpy(), 2 * data((SIZE,), seed=1))


def test_adopt_refuses_arrays_that_need_a_copy(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    for array in (data((6, 8))[::2], data((6, 8)).T, np.zeros(9, np.uint8)[1:].view("f4")):
        with pytest.raises((ValueError, DeviceMismatchError)):
            device.adopt(array)
    with pytest.raises(DeviceMismatchError, match=r"host arrays, not list|list"):
        device.adopt([1.0, 2.0])


def test_a_view_is_a_part_of_the_same_memory(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    values = data((24,))
    for buffer in (device.upload(values), device.put(values.copy())):
        part = buffer.view(5, (2, 3))
        assert (part.device, part.shape, part.dtype) == (device, (2, 3), FLOAT)
        assert part.address == buffer.address + 5 * 4
        assert part.block is buffer.block
        assert same(part.numpy(), values[5:11].reshape(2, 3))
        assert same(part.view(2, (3,)).numpy(), values[7:10])
        assert same(buffer.view(3, ()).numpy(), values[3].reshape(()))
        assert buffer.view(24, (0,)).numpy().shape == (0,)
        device.upload(data((2, 3), seed=1), out=part)
        wanted = values.copy()
        wanted[5:11] = data((6,), seed=1)
        assert same(buffer.numpy(), wanted)


def test_a_view_of_another_dtype_sees_the_same_bytes(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    values = data((12,), as_dtype("complex64"))
    buffer = device.upload(values)
    for dtype in ("float32", "uint8", "int64", "bfloat16", "complex128"):
        wanted = values[2:].view(as_dtype(dtype))
        assert same(buffer.view(2, wanted.shape, wanted.dtype).numpy(), wanted)


@pytest.mark.parametrize(
    ("start", "shape", "dtype"),
    [
        (-1, (1,), None),
        (0, (25,), None),
        (20, (5,), None),
        (25, (0,), None),
        (24, (), None),
        (0, (-1,), None),
        (0, (-2, -3), None),
        (0, (13,), "float64"),
        (22, (2,), "float64"),
        (1, (97,), "uint8"),
    ],
)
def test_a_view_stays_inside_its_buffer(one_gpu_mesh, start, shape, dtype):
    buffer = uploaded(one_gpu_mesh.devices[0], 0, (24,))
    with pytest.raises(ValueError, match="exceeds a buffer of 24 elements of float32"):
        buffer.view(start, shape, dtype and as_dtype(dtype))


def test_a_view_is_aligned_to_its_dtype(one_gpu_mesh):
    buffer = uploaded(one_gpu_mesh.devices[0], 0, (24,))
    with pytest.raises(ValueError, match="misaligned"):
        buffer.view(1, (2,), as_dtype("float64"))
    with pytest.raises(ValueError, match="misaligned"):
        buffer.view(0, (24,), as_dtype("uint8")).view(3, (1,), FLOAT)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize(("to", "of"), list(product(range(3), repeat=2)))
def test_a_copy_goes_between_any_two_devices(two_gpu_mesh, to, of, queue):
    dst_device, src_device = two_gpu_mesh.devices[to], two_gpu_mesh.devices[of]
    for runner in {dst_device, src_device}:
        src, dst = uploaded(src_device, 1), dst_device.empty((SIZE,), FLOAT)
        with two_gpu_mesh.journal() as journal:
            runner.copy(dst, src, queue=queue)
        record = Record("copy", "", runner.index, of, SIZE * 4, queue)
        assert journal.records == [record]
        two_gpu_mesh.synchronize()
        assert same(dst.numpy(), data((SIZE,), seed=1))
        assert same(src.numpy(), data((SIZE,), seed=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_keeps_bits_and_may_change_the_shape(two_gpu_mesh, dtype):
    near, _, far = two_gpu_mesh.devices
    src, dst = uploaded(near, 2, (4, 6), dtype), far.zeros((2, 12), dtype)
    far.copy(dst.view(12, (3, 4)), src.view(12, (12,)))
    wanted = data((4, 6), dtype, 2).reshape(2, 12)
    wanted[0] = 0
    assert same(dst.numpy(), wanted)


def test_adopted_memory_is_copied_too(two_gpu_mesh):
    near, _, far = two_gpu_mesh.devices
    src, dst = adopted(near, data((SIZE,))), far.empty((SIZE,), FLOAT)
    far.copy(dst, src)
    assert same(dst.numpy(), data((SIZE,)))


def test_a_copy_between_unlike_buffers_changes_nothing(two_gpu_mesh):
    near, _, far = two_gpu_mesh.devices
    dst = uploaded(far, 3)
    for wrong in (uploaded(near, 1, (SIZE - 1,)), uploaded(near, 1, dtype=as_dtype("int32"))):
        with refused(two_gpu_mesh, ValueError, "sizes and dtypes"):
            far.copy(dst, wrong)
    assert same(dst.numpy(), data((SIZE,), seed=3))


def test_a_device_copies_only_what_starts_or_ends_on_it(two_gpu_mesh):
    first, second, far = two_gpu_mesh.devices
    dst, src = uploaded(first, 3), uploaded(second, 1)
    with refused(two_gpu_mesh, DeviceMismatchError, "must belong to the mesh of"):
        far.copy(dst, src)
    assert same(dst.numpy(), data((SIZE,), seed=3))
