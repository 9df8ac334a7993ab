"""Arrays that a call writes in place: which are accepted, their values, and the waits."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.exact_data import DTYPES, exact_data, same
from support.libraries import torch
from support.meshes import mesh_of, refused

import gradreduce as gr
from gradreduce.arrays.outputs import as_out, release_outputs
from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError

FLOAT = np.dtype("float32")
SHAPE = (3, 5)
DEFERRED = [None, 0, 1, 2]


@pytest.fixture(params=DEFERRED, ids="seed={}".format)
def mesh(request):
    with gr.open_mesh([0, 0, 1], backend="sim", strict=True, schedule_seed=request.param) as opened:
        yield opened


plain = mesh_of([0, 0, 1], scope="module", strict=True)


def write(device, array, dtype=FLOAT) -> np.ndarray:
    """Writes ``array`` like a call, with deferred work; returns the expected values."""
    values = np.asarray(exact_data(tuple(array.shape), dtype))
    out = as_out(array, device, values.shape, dtype)
    assert (out.buffer.device, out.buffer.shape, out.buffer.dtype) == (device, values.shape, dtype)
    device.copy(out.buffer, device.upload(values))
    release_outputs([out])
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_numpy_array_is_written_in_place(mesh, dtype):
    for shape in (SHAPE, (), (0, 2), (1000,)):
        array = np.zeros(shape, dtype)
        assert same(write(mesh.devices[2], array, dtype), array)
    inside = np.zeros((4, 5), dtype)
    expected = write(mesh.devices[0], inside[1:3], dtype)
    assert same(inside[1:3], expected)
    assert not inside[[0, 3]].view(np.uint8).any()


@pytest.mark.torch
def test_a_tensor_is_written_in_place_and_autograd_notices(mesh):
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
        tensor = torch.zeros(SHAPE, dtype=dtype)
        version = tensor._version
        expected = write(mesh.devices[1], tensor, as_dtype(str(dtype).removeprefix("torch.")))
        halves = dtype is torch.bfloat16
        found = (tensor.view(torch.int16) if halves else tensor).numpy().view(expected.dtype)
        assert same(found, expected)
        assert tensor._version > version
    kept = torch.ones(SHAPE)
    product = (kept * torch.ones(SHAPE, requires_grad=True)).sum()
    write(mesh.devices[1], kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        write(mesh.devices[1], torch.zeros(SHAPE))
    leaf = torch.nn.Parameter(torch.zeros(SHAPE))
    with torch.no_grad():
        assert same(write(mesh.devices[1], leaf), leaf.detach().numpy())


def test_an_array_of_a_flat_buffer_is_written_through_its_block(mesh):
    flat = mesh.flat_buffer([SHAPE, (2,)], FLOAT)
    array, view = flat.arrays()[1][0], flat.views[1][0]
    out = as_out(array, mesh.devices[1], SHAPE, FLOAT)
    assert (out.buffer.block, out.buffer.address) == (view.block, view.address)
    assert same(write(mesh.devices[1], array), array)
    assert same(view.numpy(), array)
    with refused(mesh, DeviceMismatchError, "in a flat buffer of sim:1; expected one on sim:0"):
        as_out(array, mesh.devices[0], SHAPE, FLOAT)


def test_a_buffer_is_written_directly(mesh):
    buffer = mesh.devices[1].zeros(SHAPE, FLOAT)
    out = as_out(buffer, mesh.devices[1], SHAPE, FLOAT)
    assert out.buffer is buffer
    release_outputs([out])
    with refused(mesh, DeviceMismatchError, "expected one on sim:0"):
        as_out(buffer, mesh.devices[0], SHAPE, FLOAT)


def test_work_that_is_deferred_never_reads_or_writes_a_host_array_later():
    """The host may use its array freely before the call and after ``release_outputs``."""
    for seed in range(4):
        with gr.open_mesh(1, backend="sim", strict=True, schedule_seed=seed) as mesh:
            device, array = mesh.devices[0], np.full(SHAPE, 5, FLOAT)
            out = as_out(array, device, SHAPE, FLOAT)
            device.copy(out.buffer, device.upload(np.full(SHAPE, 7, FLOAT)))
            assert (array == 5).all()
            release_outputs([out])
            assert (array == 7).all()
            array[...] = 9
            device.synchronize()
            assert (array == 9).all()


def fixed() -> np.ndarray:
    array = np.zeros(SHAPE, FLOAT)
    array.flags.writeable = False
    return array


def array_of(library: str):
    """An array that claims to be of ``library`` and to have the expected type."""
    said = {"dtype": FLOAT, "shape": SHAPE, **dict.fromkeys(("devices", "get", "layout"))}
    return type("Array", (), {"__module__": library, **said})()


REFUSED = [
    (np.zeros((5, 3), FLOAT), ValueError, r"is float32\[5, 3\]; expected float32\[3, 5\]"),
    (np.zeros(SHAPE), ValueError, r"is float64\[3, 5\]; expected float32\[3, 5\]"),
    (np.zeros(SHAPE, bool), TypeError, "cannot be added"),
    (fixed(), ValueError, "read-only"),
    (np.zeros((3, 10), FLOAT)[:, ::2], ValueError, "not dense, or not aligned"),
    (np.zeros(SHAPE, FLOAT)[::-1], ValueError, "not dense, or not aligned"),
    (np.zeros(61, np.uint8)[1:].view(FLOAT).reshape(SHAPE), ValueError, "not aligned"),
    ([[0.0] * 5] * 3, TypeError, "list is not an array"),
    (array_of("jaxlib"), TypeError, "Array is immutable"),
    (np.ma.zeros(SHAPE, FLOAT), TypeError, "mask"),
    (None, TypeError, "NoneType is not an array"),
]


def test_what_cannot_be_written_is_refused(plain):
    device, cupys = plain.devices[1], array_of("cupy")
    for array, error, match in REFUSED:
        with refused(plain, error, match):
            as_out(array, device, SHAPE, FLOAT)
    with refused(plain, TypeError, "float32 is a number"):
        as_out(np.float32(1), device, (), FLOAT)
    with refused(plain, ValueError, "read-only"):
        as_out(device.put(fixed()), device, SHAPE, FLOAT)
    cupys.device, cupys.flags = SimpleNamespace(id=3), SimpleNamespace(c_contiguous=True)
    cupys.data = SimpleNamespace(ptr=0)
    with refused(plain, DeviceMismatchError, "out is on GPU 3; expected it on <device sim:1"):
        as_out(cupys, device, SHAPE, FLOAT)


@pytest.mark.torch
def test_tensors_that_cannot_be_written_are_refused(plain):
    leaf = torch.zeros(SHAPE, requires_grad=True)
    for tensor, error, match in [
        (leaf, ValueError, r"requires grad: pass its \.detach\(\)"),
        (torch.zeros(3, 10)[:, ::2], ValueError, "not dense, or not aligned"),
        (torch.zeros(1, 5).expand(3, 5), ValueError, "not dense, or not aligned"),
        (torch.zeros(SHAPE, device="meta"), DeviceMismatchError, "out is on meta"),
        (torch.zeros(SHAPE).to_sparse(), ValueError, "is a sparse tensor or a lazy view"),
        (torch.zeros(SHAPE, dtype=torch.bool), TypeError, "cannot be added"),
    ]:
        with refused(plain, error, match):
            as_out(tensor, plain.devices[0], SHAPE, FLOAT)
    with torch.no_grad(), refused(plain, ValueError, "requires grad"):
        with torch.enable_grad():
            middle = leaf * 2
        as_out(middle, plain.devices[0], SHAPE, FLOAT)
    conjugate = torch.zeros(SHAPE, dtype=torch.complex64).conj()
    with refused(plain, ValueError, "is a sparse tensor or a lazy view"):
        as_out(conjugate, plain.devices[0], SHAPE, np.dtype("complex64"))
    assert not leaf.detach().numpy().any()
