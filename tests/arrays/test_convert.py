"""Conversion of arrays: which are accepted, which are copied, and the type of results."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.exact_data import DTYPES, exact_data, same
from support.meshes import MeshCase, mesh_of, owned

from gradreduce.arrays.convert import as_result_kind, from_buffer, is_array, kind_of, to_buffer
from gradreduce.device import as_dtype
from gradreduce.errors import DeviceMismatchError

mesh = mesh_of([0, 1], scope="module", strict=True)


@pytest.fixture
def device(mesh):
    return mesh.devices[1]


def array_of(library: str):
    """An object whose type claims to be an array of ``library``."""
    said = dict.fromkeys(("devices", "get", "layout"))  # of arrays only
    return type("Array", (), {"__module__": library, **said})()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), np.float32(1), 1, 1.5, 1j, [1, 2], (1.0, [2.0]), [], np.zeros((0, 2))],
    ids=repr,
)
def test_numpy_arrays_and_numbers_have_the_native_kind(value):
    assert kind_of(value) == "native"


def test_a_buffer_has_its_own_kind(device):
    assert kind_of(device.empty((2,), "float32")) == "buffer"


def test_only_arrays_have_a_dtype_of_their_own(device):
    for value in (device.empty((2,), "float32"), np.zeros(2), np.int8(1)):
        assert is_array(value)
    for value in (1, 1.0, [1], (1,), None):
        assert not is_array(value)


@pytest.mark.parametrize(
    ("module", "kind"),
    [("torch", "torch"), ("cupy._core.core", "cupy"), ("jaxlib._jax", "jax"), ("jax.core", "jax")],
)
def test_arrays_of_other_libraries_are_recognized_by_their_module(module, kind):
    loaded = set(sys.modules)
    assert kind_of(array_of(module)) == kind
    assert kind_of(type("Sub", (type(array_of(module)),), {"__module__": "mine"})()) == kind
    assert not {"torch", "cupy", "jax"} & (set(sys.modules) - loaded)


def test_output_type_must_name_an_imported_library():
    assert as_result_kind(None, "native") == "native"
    assert as_result_kind("buffer", "native") == "buffer"
    with pytest.raises(ValueError, match=r"output_type='tensor' is not one of \('numpy'"):
        as_result_kind("tensor", "native")
    if "cupy" not in sys.modules:
        with pytest.raises(ValueError, match="output_type='cupy': cupy is not imported"):
            as_result_kind("cupy", "native")


def test_simulated_memory_is_no_cupy_array(device):
    with pytest.raises(ValueError, match="cannot be converted to a CuPy array"):
        from_buffer(device.empty((2,), "float32"), "cupy")


@pytest.mark.parametrize(
    "value",
    [None, "text", b"bytes", {1.0}, {"a": 1.0}, object(), "torch", "jaxlib", "cupy"],
    ids=repr,
)
def test_what_is_no_array_is_refused(device, value):
    if value in ("torch", "jaxlib", "cupy"):  # other objects of these libraries
        value = type("Other", (), {"__module__": value})()
    with pytest.raises(TypeError, match="is not an array, a list of numbers or a Buffer"):
        to_buffer(value, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 0, 3)], ids=str)
def test_a_contiguous_array_is_shared(device, shape, dtype):
    array = np.asarray(exact_data(shape, dtype))
    with device.mesh.journal() as journal:
        buffer = to_buffer(array, device)
        back = from_buffer(buffer, "numpy")
    assert journal.records == []
    assert (buffer.device, buffer.shape, buffer.dtype) == (device, shape, dtype)
    assert address(back) == address(array)
    assert same(back, array)
    assert not buffer.block.owned


def test_later_writes_are_visible(device):
    array = np.zeros(3, np.float32)
    buffer = to_buffer(array, device)
    array[1] = 7
    assert buffer.numpy()[1] == 7


def test_a_read_only_array_is_shared_and_stays_so(device):
    array = np.arange(3.0)
    array.flags.writeable = False
    buffer = to_buffer(array, device)
    assert address(from_buffer(buffer, "numpy")) == address(array)
    assert not buffer.block.writable
    with pytest.raises(ValueError, match="read-only"):
        device.upload(np.zeros(3), out=buffer)


def misaligned() -> np.ndarray:
    return np.zeros(17, np.uint8)[1:].view(np.float64)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0)[::2],
        np.arange(12.0)[::-1],
        np.broadcast_to(np.float32(3), (4,)),
        misaligned(),
    ],
    ids=["transposed", "strided", "backwards", "broadcast", "misaligned"],
)
def test_any_other_array_is_copied(device, array):
    buffer = to_buffer(array, device)
    assert buffer.block.owned
    assert same(buffer.numpy(), np.ascontiguousarray(array))
    assert not np.shares_memory(from_buffer(buffer, "numpy"), array)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "int64"), (1.5, "float64"), (1j, "complex128"), ([1, 2], "int64"),
        ([[1.0], [2]], "float64"), ([], "float64"), (np.float16(1), "float16"),
        ([np.float32(1), np.float32(2)], "float32"),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_are_converted_as_by_numpy(device, value, dtype):
    buffer = to_buffer(value, device)
    assert same(buffer.numpy(), np.asarray(value))
    assert buffer.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_converted_to_the_requested_dtype(device, dtype):
    wanted = np.array([[0, 1], [2, 100]]).astype(dtype)
    assert same(to_buffer([[0, 1], [2, 100]], device, dtype=dtype).numpy(), wanted)
    assert same(to_buffer(3, device, dtype=dtype).numpy(), np.array(3).astype(dtype))
    assert same(to_buffer([], device, dtype=dtype).numpy(), np.array([], dtype))


LOSSY, RANGE = "cannot convert .* numbers to {}", "out of range for {}"


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [(1.5, "int32", LOSSY), ([1.0], "uint8", LOSSY), (1j, "float32", LOSSY),
     (["1"], "float32", LOSSY), ([2**70], "float32", LOSSY), (128, "int8", RANGE),
     ([-129, 0], "int8", RANGE), (-1, "uint64", RANGE), ([2**31], "int32", RANGE),
     (256, "uint8", RANGE), (2**63, "int64", RANGE)],
    ids=str,
)  # fmt: skip
def test_numbers_that_a_dtype_does_not_have_are_refused(device, value, dtype, text):
    with pytest.raises(ValueError, match=text.format(dtype)):
        to_buffer(value, device, dtype=as_dtype(dtype))
    limits = {"int8": (-128, 127), "uint8": (0, 255), "uint64": (0, 2**64 - 1)}
    for limit in limits.get(dtype, ()):
        assert int(to_buffer(limit, device, dtype=as_dtype(dtype)).numpy()) == limit


def test_an_array_keeps_its_dtype(device):
    assert to_buffer(np.zeros(2, np.float16), device, dtype=as_dtype("float32")).dtype == "float16"
    assert to_buffer(np.float64(1), device, dtype=as_dtype("float32")).dtype == "float64"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, bool),
        np.zeros(2, ">f4"),
        np.zeros(2, object),
        np.array(["a"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "f4,f4"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_what_cannot_be_added_is_refused(device, array):
    with pytest.raises(TypeError, match="cannot be added; supported are integers"):
        to_buffer(array, device)


def test_lists_of_what_cannot_be_added_are_refused(device):
    for value in ([True, False], ["a"], True):
        with pytest.raises(TypeError, match="cannot be added"):
            to_buffer(value, device)


def test_a_buffer_is_not_copied_to_another_device(mesh):
    buffer = owned(mesh.devices[0], np.zeros(2, np.float32))
    assert to_buffer(buffer, mesh.devices[1]) is buffer
    assert from_buffer(buffer, "buffer") is buffer
    with MeshCase((0,)).open() as other, pytest.raises(DeviceMismatchError, match="another mesh"):
        to_buffer(buffer, other.devices[0])


def test_a_returned_array_keeps_its_memory(device):
    buffer = owned(device, np.arange(8, dtype=np.float32))
    array = from_buffer(buffer.view(2, (2, 2)), "numpy")
    assert np.array_equal(array, [[2, 3], [4, 5]])
    array[0, 0] = 9  # the result is the caller's memory
    assert buffer.numpy()[2] == 9
    del buffer
    fresh = [device.empty((8,), "float32") for _ in range(4)]
    assert np.array_equal(array, [[9, 3], [4, 5]])
    assert len(fresh) == 4
