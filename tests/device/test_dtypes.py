"""One table of dtypes: which are accepted, which refused, and their accumulate types."""

import ml_dtypes
import numpy as np
import pytest
from support.exact_data import DTYPES

from gradreduce.device import accumulate_dtype, as_dtype, mean_dtype
from gradreduce.device.memory.dtypes import BFLOAT16, C_TYPES, ELEMENT_OF, ELEMENTS

NAMES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
]


def test_a_dtype_may_be_a_name_a_type_or_a_dtype():
    assert sorted(map(str, DTYPES)) == sorted(NAMES)
    for name in NAMES:
        found = as_dtype(name)
        assert isinstance(found, np.dtype)
        assert str(found) == found.name == name
        assert as_dtype(found) == as_dtype(found.type) == found
        assert as_dtype(found.newbyteorder("=")) == found


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (float, "float64"),
        (int, str(np.dtype(int))),
        (complex, "complex128"),
        ("f4", "float32"),
        ("<f2", "float16") if np.little_endian else (">f2", "float16"),
        (np.longlong, "int64"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_other_spellings_of_a_dtype(alias, name):
    found = as_dtype(alias)
    assert found == as_dtype(name)
    assert ELEMENT_OF[found] == ELEMENT_OF[as_dtype(name)]


@pytest.mark.parametrize(
    "dtype",
    [bool, "bool", str, "U3", bytes, "S3", object, "O", "M8[s]", "m8[s]", "V4", "f4,i4", "(2,)f4",
     "float8_e4m3", np.longdouble, np.clongdouble, [("a", "f4")]],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_added_is_refused(dtype):
    with pytest.raises(
        TypeError, match=r"cannot be added; supported are .*float16, bfloat16.*complex128"
    ):
        as_dtype(dtype)


def test_foreign_byte_order_is_refused():
    wide = [as_dtype(name) for name in NAMES if as_dtype(name).itemsize > 1]
    foreign = [dtype for dtype in wide if dtype.newbyteorder("S") != dtype]
    assert {*wide} - {*foreign} <= {BFLOAT16}  # old ml_dtypes have the native order alone
    for dtype in foreign:
        with pytest.raises(TypeError, match="cannot be added"):
            as_dtype(dtype.newbyteorder("S"))


@pytest.mark.parametrize(
    "dtype", [None, "", 3, "bfloat", {"a": 1}, {"names": ["a"]}, object(), np.floating]
)
def test_invalid_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="names no NumPy dtype"):
        as_dtype(dtype)


SMALL = ("int8", "uint8", "int16", "uint16")
MEANS = {**dict.fromkeys(SMALL, "float32"),
         **dict.fromkeys(("int32", "uint32", "int64", "uint64"), "float64")}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_has_a_type_of_sums_a_type_of_means_and_an_element(dtype):
    """Half precision is added in float32. The mean of integers is a float, as in TensorFlow."""
    halves = (np.dtype("float16"), BFLOAT16)
    assert accumulate_dtype(dtype) == (np.dtype("float32") if dtype in halves else dtype)
    assert mean_dtype(dtype).name == MEANS.get(dtype.name, dtype.name)
    element = ELEMENT_OF[dtype]
    seen = dtype if element.viewed is None else element.viewed
    assert seen.name == element.name
    assert seen.itemsize * element.lanes == dtype.itemsize
    assert ELEMENTS[element.name][1] == accumulate_dtype(seen).name
    values = np.array([3, 250, 7, 100], np.uint8)
    first, second = values[:2].astype(dtype), values[2:].astype(dtype)
    added = (first.view(seen) + second.view(seen)).view(dtype)
    with np.errstate(over="ignore"):
        assert (added == first + second).all()


def test_every_element_is_used_and_a_kernel_can_be_told_the_sign_of_an_integer():
    assert {ELEMENT_OF[dtype].name for dtype in DTYPES} == set(ELEMENTS)
    signed = {f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)}
    assert {name: c_type for name, c_type in C_TYPES.items() if name not in ELEMENTS} == signed
    assert len(set(C_TYPES.values())) == len(C_TYPES)


def test_a_dtype_of_pytorch_is_found_by_its_name():
    """Users of PyTorch pass ``tensor.dtype``; PyTorch is not imported for it."""

    class Dtype:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"torch.{self.name}"

    Dtype.__module__ = "torch"
    for name in ("float32", "bfloat16", "int64", "complex64"):
        assert as_dtype(Dtype(name)) == as_dtype(name)
    for name in ("bool", "float8_e5m2", "qint8"):
        with pytest.raises(TypeError):
            as_dtype(Dtype(name))


@pytest.mark.torch
def test_dtypes_of_pytorch_itself():
    torch = pytest.importorskip("torch")
    assert as_dtype(torch.float16) == as_dtype("float16")
    assert as_dtype(torch.zeros(2, dtype=torch.bfloat16).dtype) == as_dtype("bfloat16")


def test_equal_dtypes_become_one_object():
    """Plans are cached by the identity of dtypes, and the id of a freed object may be reused."""
    for other in (np.dtype("float32", metadata={"unit": "m"}), "f4", np.float32):
        assert as_dtype(other) is np.dtype("float32")
    assert as_dtype("longlong") is np.dtype("int64")
