"""Every backend keeps the promises of ``gradreduce/device/README.md``: memory, views, copies.

``test_contract_launch.py`` tests launches, queues and the journal, ``test_contract_lifetime.py``
lifetimes and closed meshes, ``test_contract_collective.py`` collectives.
"""

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


def test_put_shares_a_contiguous_array_or_reads_it_at_once(one_gpu_mesh):
    """With queued work the owner could change a shared array too early."""
    device = one_gpu_mesh.devices[1]
    for array in (data((5, 7)), data(()), data((0, 3)), data((9,))[2:], data((4,), "bfloat16")):
        buffer, out = device.put(array), device.empty(array.shape, array.dtype)
        assert (buffer.device, buffer.shape, buffer.dtype) == (device, array.shape, array.dtype)
        device.copy(out, buffer)
        wanted = array.copy()
        array[...] = 3
        if not device.defers:
            assert not buffer.block.owned
            assert buffer.address == array.ctypes.data
        assert same(buffer.numpy(), wanted if device.defers else array)
        assert same(out.numpy(), wanted)


def test_put_copies_other_arrays_and_does_not_change_them(one_gpu_mesh):
    device, whole = one_gpu_mesh.devices[0], data((6, 8))
    misaligned = np.zeros(21, np.uint8)[1:].view(np.float32)
    misaligned[...] = data((5,))
    for array in (whole[::2], whole[:, 1:3], whole[::-1], whole.T, misaligned):
        before = array.copy()
        buffer = device.put(array)
        assert buffer.block.owned
        add(device, buffer, buffer, buffer)
        assert same(buffer.numpy(), before + before)
        assert same(array, before)
        with pytest.raises((ValueError, DeviceMismatchError)):
            device.adopt(array)
    with pytest.raises(DeviceMismatchError, match=r"host arrays, not list|list"):
        device.adopt([1.0, 2.0])


def test_released_and_adopted_memory_is_shared(one_gpu_mesh):
    device = one_gpu_mesh.devices[0]
    released = uploaded(device, 1, (5, 7))
    theirs = device.release(released)
    assert theirs.shape == (5, 7)
    adopted = device.adopt(theirs)
    assert (adopted.device, adopted.shape, adopted.dtype) == (device, (5, 7), FLOAT)
    for buffer in (released, adopted):
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


def test_a_view_stays_inside_its_buffer_and_is_aligned(one_gpu_mesh):
    buffer = uploaded(one_gpu_mesh.devices[0], 0, (24,))
    for start, shape, dtype in [
        (-1, (1,), FLOAT),
        (0, (25,), FLOAT),
        (20, (5,), FLOAT),
        (25, (0,), FLOAT),
        (24, (), FLOAT),
        (0, (-1,), None),
        (0, (-2, -3), None),
        (0, (13,), as_dtype("float64")),
        (22, (2,), as_dtype("float64")),
        (1, (97,), as_dtype("uint8")),
    ]:
        with pytest.raises(ValueError, match="exceeds a buffer of 24 elements of float32"):
            buffer.view(start, shape, dtype)
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
    """Also a copy of adopted memory."""
    near, _, far = two_gpu_mesh.devices
    for src in (uploaded(near, 2, (4, 6), dtype), adopted(near, data((4, 6), dtype, 2))):
        dst = far.zeros((2, 12), dtype)
        far.copy(dst.view(12, (3, 4)), src.view(12, (12,)))
        wanted = data((4, 6), dtype, 2).reshape(2, 12)
        wanted[0] = 0
        assert same(dst.numpy(), wanted)


def test_a_copy_that_is_refused_changes_nothing(two_gpu_mesh):
    near, beside, far = two_gpu_mesh.devices
    dst, here, other = uploaded(far, 3), uploaded(near, 4), uploaded(beside, 1)
    for wrong in (uploaded(near, 1, (SIZE - 1,)), uploaded(near, 1, dtype=as_dtype("int32"))):
        with refused(two_gpu_mesh, ValueError, "sizes and dtypes"):
            far.copy(dst, wrong)
    with refused(two_gpu_mesh, DeviceMismatchError, "must belong to the mesh of"):
        far.copy(here, other)  # it is at neither end
    assert same(dst.numpy(), data((SIZE,), seed=3))
    assert same(here.numpy(), data((SIZE,), seed=4))
