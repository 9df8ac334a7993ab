"""Reads names, shapes and dtypes of the tensors in a file; no tensor is loaded."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gradreduce.device import as_shape
from gradreduce.errors import brief
from gradreduce.npz_file import read_header, reading_errors

_MOST_HEADER_BYTES = 100 << 20  # the limit of safetensors' own reader
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "C64": "complex64",
}  # fmt: skip

Header = tuple[str, tuple[int, ...], str]  # name, shape and dtype of a tensor


def read_headers(path: Path) -> list[Header]:
    """Returns the headers of a ``.safetensors`` or ``.npz`` file, in the order of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not of these types, or not valid.
    """
    readers = {".safetensors": _of_safetensors, ".npz": _of_npz}
    if path.suffix not in readers:
        raise ValueError(f"{path} must end in .safetensors or .npz")
    try:
        return list(readers[path.suffix](path))
    except reading_errors(KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid {path.suffix} file: {error}") from error


def _of_safetensors(path: Path) -> Iterator[Header]:
    """Yields the headers: 8 bytes with the size of the JSON text that follows."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(f"the size of its header would be {size} bytes")
        text = file.read(size)
    if len(text) < size:
        raise ValueError("the file ends inside its header: copy the file again")
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            name.encode()  # a lone surrogate cannot be printed
            yield (
                name,
                validate_shape(entry["shape"]),
                _DTYPES.get(entry["dtype"], entry["dtype"]),
            )


def _of_npz(path: Path) -> Iterator[Header]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                shape, _, dtype = read_header(member)
            yield name.removesuffix(".npy"), validate_shape(shape), dtype.name


def validate_shape(extents: Iterable[Any]) -> tuple[int, ...]:
    """Returns a shape.

    Raises:
        TypeError: an extent is not an integer.
        ValueError: an extent is negative, or there are 2**63 elements or more.
    """
    shape = as_shape("shape", extents)
    if math.prod(shape) >= 2**63:
        raise ValueError(f"the shape {brief(shape)} has 2**63 elements or more")
    return shape
