"""The values of the file as arrays, and the comparison of what a step gave with what it must."""

from typing import Any

import numpy as np
from support.exact_data import same

import gradreduce as gr
from gradreduce.device import Buffer, as_dtype


def decoded(encoded: Any, dtype: str = "float32") -> np.ndarray:
    """An array of the file; ``dtype`` is that of one which names none."""
    if not isinstance(encoded, dict):
        return _array(encoded, dtype)
    dtype = encoded.get("dtype", dtype)
    if "arange" in encoded:
        array = (np.arange(encoded["arange"]) + encoded.get("start", 0)).astype(as_dtype(dtype))
    else:
        array = _array(encoded["data"], dtype)
    return array.reshape(encoded["shape"]) if "shape" in encoded else array


def is_sparse(encoded: Any) -> bool:
    return isinstance(encoded, dict) and encoded.get("kind") == "IndexedSlices"


def check_equal(made: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    """Asserts that a step gave what the file, or ``better``, says.

    Of a dictionary that is no array every key that is expected must be there.
    """
    kind = expected.get("kind") if isinstance(expected, dict) else None
    if kind is not None:
        _KINDS[kind](made, expected, tolerance, where)
    elif isinstance(expected, dict) and "dtype" in expected:
        _check_array(made, expected, tolerance, where)
    elif isinstance(expected, dict):
        assert set(expected) <= set(made), f"{where}: {sorted(made)} lacks some of {list(expected)}"
        for key, value in expected.items():
            check_equal(made[key], value, tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list) and isinstance(made, list | tuple):
        assert len(made) == len(expected), f"{where}: {len(made)} of {len(expected)} values"
        for place, value in enumerate(expected):
            check_equal(made[place], value, tolerance, f"{where}[{place}]")
    else:
        assert type(made) is type(expected), f"{where}: {made!r} is not {expected!r}"
        assert made == expected, f"{where}: {made!r} is not {expected!r}"


def device_name(device: gr.Device) -> str:
    """The file's name of a logical device."""
    return f"/cpu:{device.index}"


def host(array: Any) -> np.ndarray:
    """What a step gave as a NumPy array."""
    if isinstance(array, Buffer | gr.Variable):
        return array.numpy()
    assert isinstance(array, np.ndarray | np.generic | int | float | list | tuple), repr(array)
    return np.asarray(array)


def _array(data: Any, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.array(data, bool)
    wanted = as_dtype(dtype)
    if wanted.kind in "iu":
        return np.array(data, wanted)
    numbers = np.array(_numbers(data), np.float64)
    if wanted.kind == "c":  # pairs of the real and the imaginary part
        numbers = numbers[..., 0] + 1j * numbers[..., 1]
    return numbers.astype(wanted)


def _numbers(data: Any) -> Any:
    """Nested lists with the strings nan, inf and -inf as numbers."""
    return [_numbers(each) for each in data] if isinstance(data, list) else float(data)


def _check_array(made: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    found, wanted = host(made), decoded(expected)
    text = f"{where}: {found.dtype}{list(found.shape)} {found} is not {expected}"
    if not tolerance["rtol"] and not tolerance["atol"] and wanted.dtype != bool:
        assert same(found, wanted), text
        return
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), text
    assert np.allclose(found, wanted, **tolerance, equal_nan=True), text


def _check_slices(made: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    assert isinstance(made, gr.IndexedSlices), f"{where}: {made!r} is no IndexedSlices"
    indices = {**expected["indices"], "dtype": "int64"}
    _check_array(made.indices, indices, tolerance, f"{where}.indices")
    _check_array(made.values, expected["values"], tolerance, f"{where}.values")
    shape = expected["dense_shape"]
    found = None if made.dense_shape is None else list(made.dense_shape)
    assert found == shape, f"{where}.dense_shape: {found} is not {shape}"


def _check_mirrored(made: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    assert isinstance(made, gr.Mirrored), f"{where}: {made!r} is no Mirrored"
    found = [device_name(device) for device in made.devices]
    assert found == expected["devices"], f"{where} lies on {found}, not on {expected['devices']}"
    check_equal(list(made.values), expected["values"], tolerance, where)


def _check_tensor(made: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    """Newer TensorFlow's word for a Mirrored on one device."""
    one = {"devices": [expected["device"]], "values": [expected["value"]]}
    _check_mirrored(made, one, tolerance, where)


_KINDS = {
    "IndexedSlices": _check_slices,
    "Mirrored": _check_mirrored,
    "Tensor": _check_tensor,
    "float": lambda made, expected, *rest: _check_array(made, expected["value"], *rest),
}
