"""Conversion of arrays: which are accepted, which are copied, and the type of results."""

import sys

import numpy as np
import pytest
from support.exact_data import DTYPES, exact_data, same
from support.meshes import mesh_of

from gradreduce.arrays.convert import as_result_kind, from_buffer, is_array, kind_of, to_buffer
from gradreduce.device import as_dtype

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


def test_the_kinds_of_arrays(device):
    arrays, numbers = (np.zeros(2), np.float32(1), np.zeros((0, 2))), (1, 1.5, 1j, [1], (1.0,), [])
    assert {kind_of(value) for value in (*arrays, *numbers)} == {"native"}
    buffer = device.empty((2,), "float32")
    assert kind_of(buffer) == "buffer"
    assert all(map(is_array, (buffer, *arrays))) and not any(map(is_array, (*numbers, None)))
    loaded = set(sys.modules)
    for module in ("torch", "cupy._core.core", "jaxlib._jax", "jax.core"):
        kind = module.partition(".")[0].removesuffix("lib")
        assert kind_of(array_of(module)) == kind
        assert kind_of(type("Sub", (type(array_of(module)),), {"__module__": "mine"})()) == kind
    assert not {"torch", "cupy", "jax"} & (set(sys.modules) - loaded)


def test_output_type_must_name_an_imported_library(device):
    with pytest.raises(ValueError, match=r"output_type='tensor' is not one of \('numpy'"):
        as_result_kind("tensor", "native")
    if "cupy" not in sys.modules:
        with pytest.raises(ValueError, match="output_type='cupy': cupy is not imported"):
            as_result_kind("cupy", "native")
    with pytest.raises(ValueError, match="cannot be converted to a CuPy array"):
        from_buffer(device.empty((2,), "float32"), "cupy")


def test_what_is_no_array_or_cannot_be_added_is_refused(device):
    # other objects of these libraries
    others = [type("Other", (), {"__module__": name})() for name in ("torch", "jaxlib", "cupy")]
    for value in (None, "text", b"bytes", {1.0}, {"a": 1.0}, object(), *others):
        with pytest.raises(TypeError, match="is not an array, a list of numbers or a Buffer"):
            to_buffer(value, device)
    for dtype in (bool, ">f4", object, "U1", "M8[s]", "f4,f4", np.longdouble):
        with pytest.raises(TypeError, match="cannot be added; supported are integers"):
            to_buffer(np.zeros(2, dtype), device)
    for value in ([True, False], ["a"], True):
        with pytest.raises(TypeError, match="cannot be added"):
            to_buffer(value, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_contiguous_array_is_shared(device, dtype):
    for shape in [(), (1,), (0,), (3, 5), (2, 0, 3)]:
        array = np.asarray(exact_data(shape, dtype))
        for writable in (True, False):
            array.flags.writeable = writable
            with device.mesh.journal() as journal:
                buffer = to_buffer(array, device)
                back = from_buffer(buffer, "numpy")
            assert journal.records == []
            assert (buffer.device, buffer.shape, buffer.dtype) == (device, shape, dtype)
            assert address(back) == address(array)
            assert same(back, array)
            assert (buffer.block.owned, buffer.block.writable) == (False, writable)
        with pytest.raises(ValueError, match="read-only"):
            device.upload(array, out=buffer)


def test_any_other_array_is_copied(device):
    for array in (
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0)[::2],
        np.arange(12.0)[::-1],
        np.broadcast_to(np.float32(3), (4,)),
        np.zeros(17, np.uint8)[1:].view(np.float64),  # misaligned
    ):
        buffer = to_buffer(array, device)
        assert buffer.block.owned
        assert same(buffer.numpy(), np.ascontiguousarray(array))
        assert not np.shares_memory(from_buffer(buffer, "numpy"), array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_converted_to_the_requested_dtype(device, dtype):
    for numbers in ([[0, 1], [2, 100]], 3, []):
        found = to_buffer(numbers, device, dtype=dtype).numpy()
        assert same(found, np.array(numbers).astype(dtype))
    for array in (np.zeros(2, np.float16), np.float64(1)):  # which keep theirs
        assert to_buffer(array, device, dtype=dtype).dtype == array.dtype


def test_numbers_that_a_dtype_does_not_have_are_refused(device):
    lossy, out_of_range = "cannot convert .* numbers to {}", "out of range for {}"
    for value, dtype, text in [
        (1.5, "int32", lossy), ([1.0], "uint8", lossy), (1j, "float32", lossy),
        (["1"], "float32", lossy), ([2**70], "float32", lossy), (128, "int8", out_of_range),
        ([-129, 0], "int8", out_of_range), (-1, "uint64", out_of_range),
        ([2**31], "int32", out_of_range), (256, "uint8", out_of_range),
        (2**63, "int64", out_of_range),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text.format(dtype)):
            to_buffer(value, device, dtype=as_dtype(dtype))
    limits = {"int8": (-128, 127), "uint8": (0, 255), "uint64": (0, 2**64 - 1)}
    for dtype, both in limits.items():
        for limit in both:
            assert int(to_buffer(limit, device, dtype=as_dtype(dtype)).numpy()) == limit
