"""How a caller's array becomes a Buffer, and a Buffer the caller's array; never copies needlessly.

The only room that knows other array libraries. It never imports one: an array of theirs exists
only if the caller has.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from gradreduce.device import Buffer, Device, as_dtype
from gradreduce.errors import DeviceMismatchError

__all__ = ["Kind", "from_buffer", "is_array", "kind_of", "to_buffer"]

Kind = Literal["numpy", "buffer"]
_FOREIGN = {"cupy": "CuPy", "torch": "PyTorch", "jax": "JAX", "jaxlib": "JAX"}


def kind_of(value: Any) -> Kind:
    """Which kind of array a result for ``value`` is: a Buffer stays one, numbers become NumPy's.

    Raises:
        NotImplementedError: an array of CuPy, PyTorch or JAX.
        TypeError: nothing that can be an array.
    """
    if isinstance(value, Buffer):
        return "buffer"
    if isinstance(value, np.ndarray | np.generic | int | float | complex | list | tuple):
        return "numpy"
    library = _FOREIGN.get(type(value).__module__.partition(".")[0])
    if library is not None:
        raise NotImplementedError(
            f"arrays of {library} are not taken in by this version: pass a NumPy array"
        )
    raise TypeError(f"{type(value).__name__} is not an array, a list of numbers or a Buffer")


def is_array(value: Any) -> bool:
    """Whether ``value`` has a dtype of its own; lists and Python numbers take what is wanted."""
    return isinstance(value, Buffer | np.ndarray | np.generic)


def to_buffer(value: Any, device: Device, *, dtype: np.dtype | None = None) -> Buffer:
    """``value`` as a Buffer: shared where that is possible.

    Args:
        value: a Buffer, which stays where it is; or a NumPy array, number or nested list, which
            goes to ``device``.
        device: where a value that is no Buffer goes.
        dtype: what numbers and lists become; arrays keep theirs. Default: NumPy's choice.

    Raises:
        DeviceMismatchError: a Buffer of another mesh than ``device``'s.
        TypeError: a dtype that cannot be added, or no array at all.
        ValueError: a nested list that is ragged, or numbers that are not of ``dtype``.
    """
    if kind_of(value) == "buffer":
        if value.device.fabric is not device.fabric:
            raise DeviceMismatchError(f"{value} is of another mesh than {device.name}")
        buffer: Buffer = value
        return buffer
    if is_array(value):
        return device.put(value)
    array = np.asarray(value)
    if dtype is not None:
        kinds = {"f": "fiub", "c": "cfiub", "i": "iub", "u": "iub", "V": "fiub"}
        if array.size and array.dtype.kind not in kinds[dtype.kind]:
            raise ValueError(f"numbers of {array.dtype} where {dtype} is wanted")
        numbers, array = array, array.astype(dtype)
        if dtype.kind in "iu" and (array != numbers).any():
            raise ValueError(f"numbers outside the range of {dtype}: {value!r}")
    as_dtype(array.dtype)
    return device.put(array)


def from_buffer(buffer: Buffer, kind: Kind) -> Any:
    """``buffer`` as an array of ``kind``, on the same memory."""
    return buffer if kind == "buffer" else buffer.device.release(buffer)
